"""Deadlines for calls of reward functions: one timer per timeout value and event loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

from reward_loop.processes.invocation import WaitClock, no_wait

__all__ = ["Deadlines", "Watched"]


class Watched:
    """A call with a deadline. When the deadline passes, the call's future gets a `TimeoutError`.

    Args:
        future: the future that the caller awaits.
        timeout: seconds from the start of the call to its deadline; ``None`` for no deadline.
        waited: the seconds that the call has waited for limits.
    """

    __slots__ = ("future", "started", "timeout", "waited")

    def __init__(self, future: asyncio.Future[Any], timeout: float | None, waited: WaitClock = no_wait) -> None:
        self.future = future
        self.timeout = timeout
        self.waited = waited
        self.started: float | None = None
        """The start of the call by `time.monotonic`; ``None`` until the call starts."""


class Deadlines:
    """Expires calls at their deadlines, on one event loop.

    Calls with the same timeout must start in the order of their `watch` calls. One timer, for the oldest call, then
    serves all of them: a timer for each call would take 2 us per sample.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[float, OrderedDict[Watched, None]] = {}

    def watch(self, call: Watched) -> None:
        """Watch a call, if it has a deadline, until `forget` is called."""
        if call.timeout is None:
            return
        calls = self._calls.get(call.timeout)
        if calls is None:
            calls = self._calls[call.timeout] = OrderedDict()
            self._loop.call_later(call.timeout, self._look, call.timeout)
        calls[call] = None

    def forget(self, call: Watched) -> None:
        """Stop watching a call that has ended."""
        if call.timeout is not None and (calls := self._calls.get(call.timeout)) is not None:
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
            self._expire(call, call.started + timeout)
        del self._calls[timeout]

    def _expire(self, call: Watched, deadline: float) -> None:
        if call.future.done():
            return
        now = time.monotonic()
        left = deadline + call.waited(now) - now
        if left > 0:
            self._loop.call_later(left, self._expire, call, deadline)
        else:
            call.future.set_exception(TimeoutError())
