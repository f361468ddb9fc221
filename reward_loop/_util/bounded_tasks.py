"""`BoundedTasks`: tasks with one owner, of which at most a given number run at a time; and `together`."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

STARTS_PER_TURN = 32
"""Tasks started in one turn of the event loop. Starting thousands at once would block the loop for too long."""


class BoundedTasks:
    """Starts tasks in order, at most ``limit`` at a time, and owns them until they end. For one event loop.

    Work that waits costs no task: it is taken from its source when it can start.

    Args:
        start: starts the next task, and returns it; ``None`` if there is no work now. It runs in the context in which
            this object was created, and so does the task.
        ended: called with each task that has ended. It must retrieve the task's error.
        limit: how many tasks run at a time; ``None`` for no limit.
    """

    def __init__(
        self,
        start: Callable[[], asyncio.Task[None] | None],
        ended: Callable[[asyncio.Task[None]], None],
        limit: int | None = None,
    ) -> None:
        self.limit = limit
        self.tasks: set[asyncio.Task[None]] = set()
        """The tasks that have not ended."""
        self._released: set[asyncio.Task[None]] = set()
        """Those of them that do not count in the limit any more."""
        self._start = start
        self._on_end = ended
        self._is_filling = False
        # One context and one bound method for all tasks: with one each per task, the garbage collector would visit two
        # more objects for each of thousands of tasks in flight.
        self._context = contextvars.copy_context()
        self._done = self._ended

    def fill(self) -> None:
        """Start tasks soon, while there is room. Call it when there is new work; the end of a task also does it."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill, context=self._context)

    def _fill(self) -> None:
        self._is_filling = False
        for _ in range(STARTS_PER_TURN):
            if self.limit is not None and len(self.tasks) - len(self._released) >= self.limit:
                return
            if (task := self._start()) is None:
                return
            self.tasks.add(task)
            task.add_done_callback(self._done, context=self._context)
        self.fill()

    def release(self, task: asyncio.Task[None]) -> None:
        """Do not count a task in the limit any more: it waits for tasks that may not have been started."""
        self._released.add(task)
        self.fill()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._released.discard(task)
        self._on_end(task)
        self.fill()

    async def drain(self) -> None:
        """Wait until all tasks have ended, and no work is left that can start."""
        while self.tasks or self._is_filling:
            if self.tasks:
                await asyncio.wait(self.tasks)
            else:
                # Until `_fill` has run, which is scheduled for the next turn of the event loop.
                await asyncio.sleep(0)

    async def end(self, seconds: float) -> int:
        """Cancel all tasks, and wait at most ``seconds`` for their end; return the number of those that still run."""
        ending = set(self.tasks)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=seconds)
        return len(ending & self.tasks)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several calls at the same time, and return their results in order.

    The first error cancels the others, and is raised alone, without a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    # Not `except*`, which puts what is raised in it into a group again if it is one.
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
