"""Deadlines for calls of reward functions: one timer per timeout value and event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["Deadlines", "Watched", "no_wait"]


def no_wait(now: float) -> float:
    """Return 0: the call never waits for a limit."""
    return 0.0


class Watched:
    """A call with a deadline. When the deadline passes, the call's future gets a `TimeoutError`.

    Args:
        future: the future that the caller awaits.
        waited: returns the seconds of waiting up to the given `time.monotonic` that do not count towards the deadline.
        started: the start of the call by `time.monotonic`; ``None`` until the call starts.
    """

    __slots__ = ("future", "started", "waited")

    def __init__(
        self, future: asyncio.Future[Any], waited: Callable[[float], float] = no_wait, started: float | None = None
    ) -> None:
        self.future = future
        self.waited = waited
        self.started = started


class Deadlines:
    """Expires calls at their deadlines, on one event loop.

    Calls with the same timeout must start in the order of their `watch` calls. One timer, for the oldest call, then
    serves all of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[float, OrderedDict[Watched, None]] = {}

    def watch(self, call: Watched, timeout: float) -> None:
        """Watch a call until `forget` is called. ``timeout`` is in seconds from the start of the call."""
        calls = self._calls.get(timeout)
        if calls is None:
            calls = self._calls[timeout] = OrderedDict()
            self._loop.call_later(timeout, self._look, timeout)
        calls[call] = None

    def forget(self, call: Watched, timeout: float) -> None:
        """Stop watching a call that has ended."""
        calls = self._calls.get(timeout)
        if calls is not None:
            calls.pop(call, None)

    def _look(self, timeout: float) -> None:
        calls = self._calls[timeout]
        now = time.monotonic()
        while calls:
            call = next(iter(calls))
            # A call that has not started has its full timeout left.
            left = timeout if call.started is None else call.started + timeout - now
            if call.started is None or left > 0:
                self._loop.call_later(left, self._look, timeout)
                return
            del calls[call]
            self._expire(call, timeout)
        del self._calls[timeout]

    def _expire(self, call: Watched, timeout: float) -> None:
        if call.future.done():
            return
        now = time.monotonic()
        assert call.started is not None
        left = call.started + timeout + call.waited(now) - now
        if left > 0:
            self._loop.call_later(left, self._expire, call, timeout)
        else:
            call.future.set_exception(TimeoutError())
