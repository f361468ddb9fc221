"""`Backoff`: the pauses between attempts, for every part of the library that repeats something."""

from __future__ import annotations

import random

__all__ = ["Backoff"]

FIRST_S, LONGEST_S = 0.5, 5.0
"""The first and the longest pause in seconds, where no option sets them."""


class Backoff:
    """Pauses that double, each random between a half and the whole, so that many callers do not come back together."""

    __slots__ = ("_longest_s", "_pause_s")

    def __init__(self, first_s: float | None = None, longest_s: float | None = None) -> None:
        self._longest_s = LONGEST_S if longest_s is None else longest_s
        self._pause_s = min(FIRST_S if first_s is None else first_s, self._longest_s)

    def next_s(self) -> float:
        """Return the seconds of the next pause."""
        pause = self._pause_s * random.uniform(0.5, 1)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return pause
