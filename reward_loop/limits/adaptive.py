"""The concurrency that a service takes, found by trying."""

from __future__ import annotations

__all__ = ["AdaptiveConcurrency"]

INITIAL = 20
"""Calls at a time to begin with; as the adaptive connections of inspect_ai."""

SLOW_START = 2.0
"""Until the first refusal, the limit grows by this factor a round; as in TCP (RFC 5681)."""

GROWTH = 1.05
"""Afterwards it grows by this factor a round, and by one call at least; as in inspect_ai."""

CUT = 0.8
"""A refusal leaves this share of the limit; as in inspect_ai. TCP's half would give away more than a quota that is
known to be near."""

COOL_DOWN_S = 15.0
"""Seconds after a cut in which there is no other, and no growth: calls that were under way tell of the same
congestion."""


class AdaptiveConcurrency:
    """How many calls may be in flight, from how earlier ones ended. Time is given by the caller.

    A *round* is as many successes as the limit has calls, all of them let through at that limit.

    Args:
        maximum: the limit never grows above this.
    """

    def __init__(self, maximum: int | None = None) -> None:
        self.maximum = maximum
        self.limit = float(INITIAL if maximum is None else min(INITIAL, maximum))
        self.not_before = 0.0
        """No call may begin earlier: a service that refused said when to come again."""
        self._slow_start = True
        self._successes = 0
        self._quiet_until = 0.0

    @property
    def calls(self) -> int:
        """The limit, in whole calls."""
        return max(1, int(self.limit))

    def succeeded(self, now: float, in_flight: int) -> None:
        """A call ended well, while ``in_flight`` calls were made, itself among them."""
        if now < self._quiet_until:
            return
        # A limit that is not reached is not tried, and does not grow.
        if in_flight < self.calls // 2:
            return
        self._successes += 1
        if self._successes < self.calls:
            return
        self._successes = 0
        grown = self.limit * SLOW_START if self._slow_start else max(self.limit * GROWTH, self.limit + 1)
        self.limit = grown if self.maximum is None else min(grown, self.maximum)

    def refused(self, now: float, retry_after: float | None = None) -> None:
        """The service said that it is too much (HTTP 429)."""
        if retry_after is not None:
            self.not_before = max(self.not_before, now + retry_after)
        if now < self._quiet_until:
            return
        self._slow_start = False
        self._successes = 0
        self.limit = max(1.0, self.limit * CUT)
        self._quiet_until = max(now + COOL_DOWN_S, self.not_before)
