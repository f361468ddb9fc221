"""Rate-limited log lines about single requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable

from reward_loop.router.router_error import Refusal

__all__ = ["LimitedLog"]

INTERVAL_S = 10.0


class LimitedLog:
    """Logs the first message of a kind at once, then counts, and logs a summary every `interval_s` seconds."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self.refused: Counter[int] = Counter()
        """Refused requests by status."""
        self._logger = logger
        self._interval_s = interval_s
        self._suppressed: dict[Hashable, int] = {}
        """The number of suppressed messages of each kind since its last line."""
        self._latest: dict[Hashable, str] = {}
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}

    def refused_request(self, method: str, path: str, refusal: Refusal) -> None:
        """Counts a refused request, and logs it; each HTTP status is a kind of message."""
        self.refused[refusal.status] += 1
        # A path is percent-decoded, so it may contain line breaks.
        printable = path[:200].encode("unicode_escape").decode()
        self.warning(refusal.status, "%s %s: %d, %s", method, printable, refusal.status, refusal.message)

    def warning(self, kind: Hashable, message: str, *args: object) -> None:
        """Logs a message, or only counts it if a line of this kind was logged within the interval."""
        if kind in self._suppressed:
            self._suppressed[kind] += 1
            self._latest[kind] = message % args
        else:
            self._logger.warning(message, *args)
            self._wait(kind)

    def close(self) -> None:
        """Logs the summaries of all suppressed messages now."""
        for kind in list(self._timers):
            self._timers[kind].cancel()
            self._summarise(kind, last=True)

    def _wait(self, kind: Hashable) -> None:
        self._suppressed[kind] = 0
        self._timers[kind] = asyncio.get_running_loop().call_later(self._interval_s, self._summarise, kind)

    def _summarise(self, kind: Hashable, last: bool = False) -> None:
        del self._timers[kind]
        if count := self._suppressed.pop(kind):
            self._logger.warning("%d more like this; the latest: %s", count, self._latest.pop(kind))
            if not last:
                self._wait(kind)
