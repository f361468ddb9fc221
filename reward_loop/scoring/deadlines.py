"""The deadlines of the calls of one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["Deadlines", "Watched", "no_wait"]


def no_wait(now: float) -> float:
    """For calls that wait for nothing."""
    return 0.0


class Watched:
    """A call with a deadline: its future gets a `TimeoutError` when that has passed.

    Args:
        future: what the call's caller waits for.
        waited: how many seconds, up to the given `time.monotonic`, do not count towards the deadline.
        started: when the call started, by `time.monotonic`; ``None`` until it does.
    """

    __slots__ = ("future", "started", "waited")

    def __init__(
        self, future: asyncio.Future[Any], waited: Callable[[float], float] = no_wait, started: float | None = None
    ) -> None:
        self.future = future
        self.waited = waited
        self.started = started


class Deadlines:
    """Watches calls. Those with the same timeout must start in the order in which they are watched.

    So one timer, for the first of them, serves them all: a timer for each call would be a large part of what a call
    costs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[float, OrderedDict[Watched, None]] = {}

    def watch(self, call: Watched, timeout: float) -> None:
        """Watch a call until `forget`."""
        calls = self._calls.get(timeout)
        if calls is None:
            calls = self._calls[timeout] = OrderedDict()
            self._loop.call_later(timeout, self._look, timeout)
        calls[call] = None

    def forget(self, call: Watched, timeout: float) -> None:
        """The call has ended."""
        calls = self._calls.get(timeout)
        if calls is not None:
            calls.pop(call, None)

    def _look(self, timeout: float) -> None:
        calls = self._calls[timeout]
        now = time.monotonic()
        while calls:
            call = next(iter(calls))
            # One that has not started has all of its time left.
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
