"""Begin an async call at once, and make a task of it only where it waits: Python 3.12's eager tasks, for 3.11 too."""

from __future__ import annotations

import asyncio
import contextvars
import time
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from reward_loop.scoring.deadlines import Deadlines, Watched, no_wait

__all__ = ["EagerTask", "EagerTasks"]

T = TypeVar("T")


class EagerTasks:
    """Those of one event loop.

    A task, and the turn of the loop that it takes to begin, are the largest part of what a function costs that does
    not wait for anything. But code asks which task it runs in, as `asyncio.timeout` does to cancel it: so a task there
    is from the first step on, and it is lent to the next coroutine where the last one did not come to wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deadlines = Deadlines(loop)
        self._spare: EagerTask | None = None
        self._caller: asyncio.Task[Any] | None = None
        self.is_second = False
        """Whether the last one that ended at once was the second of its caller in this turn of the loop."""
        self._left: set[asyncio.Task[Any]] = set()

    def begin(
        self, coroutine: Coroutine[Any, Any, T], timeout: float | None, waited: Callable[[float], float] = no_wait
    ) -> T | EagerTask:
        """Take the first step of a coroutine, in a copy of the current context.

        Args:
            coroutine: what to run.
            timeout: seconds from now to its deadline.
            waited: how many seconds, up to the given `time.monotonic`, do not count towards the deadline.

        Returns:
            What it returned; or, if it waits for something, the task in which it goes on. Await that one's ``future``,
            which raises `TimeoutError` at the deadline, then `leave` it.

        Raises:
            BaseException: what it raised in its first step.
        """
        started, context, caller = time.monotonic(), contextvars.copy_context(), asyncio.current_task(self.loop)
        rest, self._spare = self._spare, None
        if rest is None or rest.task.done() or rest.task.cancelling():
            rest, self._caller = EagerTask(self.loop), None
        if caller is not None:
            _leave_task(self.loop, caller)
        _enter_task(self.loop, rest.task)
        try:
            awaited = context.run(coroutine.send, None)
        except StopIteration as stop:
            self._spare, self.is_second, self._caller = rest, caller is self._caller, caller
            value: T = stop.value
            return value
        finally:
            _leave_task(self.loop, rest.task)
            if caller is not None:
                _enter_task(self.loop, caller)
        rest.take(coroutine, context, awaited, waited, started)
        if timeout is not None:
            self._deadlines.watch(rest, timeout)
        return rest

    def leave(self, call: EagerTask, timeout: float | None) -> None:
        """Nobody waits for a call any more: if it has not ended, it is cancelled."""
        if timeout is not None:
            self._deadlines.forget(call, timeout)
        if not call.task.done():
            self._left.add(call.task)
            call.task.add_done_callback(self._left.discard)
            call.task.cancel()


class EagerTask(Watched, Coroutine[Any, Any, Any]):
    """What is left of a coroutine after its first step, as its task awaits it: nothing, or all that it waits for.

    The future tells how it ended. The task would not do: user code that swallows its cancellation (``except:`` around
    a retry) is left behind at its deadline, and the sample still ends.
    """

    __slots__ = ("_awaited", "_context", "_coroutine", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self.task: asyncio.Task[Any] = loop.create_task(self, context=contextvars.Context())

    def take(
        self,
        coroutine: Coroutine[Any, Any, Any],
        context: contextvars.Context,
        awaited: Any,
        waited: Callable[[float], float],
        started: float,
    ) -> None:
        """Go on with a coroutine that waits for ``awaited``."""
        super().__init__(self.task.get_loop().create_future(), waited, started)
        self._coroutine, self._context, self._awaited = coroutine, context, awaited

    def send(self, value: Any) -> Any:
        """As the task's first step, pass on what the coroutine waits for; then go on with that."""
        if self._coroutine is None:
            raise StopIteration
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            return awaited
        return self._step(self._coroutine.send, value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        """What it waits for has failed, or the task is cancelled."""
        if self._coroutine is None:
            raise error
        self._awaited = None
        return self._step(self._coroutine.throw, error)

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        try:
            return self._context.run(step, value)
        except StopIteration as stop:
            if not self.future.done():
                self.future.set_result(stop.value)
            raise
        except BaseException:  # Ctrl-C, or a cancellation that nobody took for data
            self.future.cancel()
            raise

    def close(self) -> None:
        """The event loop has ended before it."""
        if self._coroutine is not None:
            self._context.run(self._coroutine.close)

    def __getattr__(self, name: str) -> Any:
        """Have the coroutine's name and frame (``__qualname__``, ``cr_frame``), for messages and stacks."""
        return getattr(self._coroutine, name)

    def __await__(self) -> Any:
        raise RuntimeError("only its task awaits it")
