"""A time limit for tasks."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["TimeLimit"]


class TimeLimit:
    """Cancels tasks that run longer than a time limit.

    It costs 3 µs less per task than `asyncio.timeout`, a tenth of the router's time for a request: all tasks have the
    same limit, so they end in the order in which they started, and one timer serves all of them.

    Create it in a running event loop.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._deadlines: dict[asyncio.Task[Any], float] = {}
        """The deadlines of the running tasks, the earliest one first."""
        self._exceeded: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, task: asyncio.Task[Any]) -> None:
        """Starts the time of a task. Call :meth:`stop` at its end."""
        self._deadlines[task] = deadline = self._loop.time() + self.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._cancel_late)

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Stops the time of a task."""
        self._deadlines.pop(task, None)
        self._exceeded.discard(task)

    def is_exceeded(self, task: asyncio.Task[Any]) -> bool:
        """Returns whether a task that has not been stopped was cancelled because it exceeded the limit."""
        return task in self._exceeded

    def close(self) -> None:
        """Stops the timer."""
        if self._timer:
            self._timer.cancel()

    def _cancel_late(self) -> None:
        now = self._loop.time()
        self._timer = None
        while self._deadlines:
            task, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._cancel_late)
                return
            del self._deadlines[task]
            self._exceeded.add(task)
            task.cancel()
