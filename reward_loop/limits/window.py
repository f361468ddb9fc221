"""How much there was in the last minute."""

from __future__ import annotations

import math
from collections import deque

__all__ = ["MARGIN", "Charge", "SlidingWindow"]

MARGIN = 0.01
MARGIN_S = 0.25
"""A charge counts for longer than the period: by this share of it, and by these seconds at least. A call reaches its
service a little later than it is let through, some later than others: so that a window of the *service's* clock holds
no more than its limit either, two windows are kept apart by more than that difference. Of a minute, it costs one
percent of the rate."""

GRAINS = 64
"""Parts of a second. What `SlidingWindow.count` counts in one of them is kept as one charge: a minute of thousands of
calls a second stays small. A power of two, so that times come out even."""


class Charge:
    """What one call counts for; it can be corrected while it is in the window."""

    __slots__ = ("amount", "time")

    def __init__(self, time: float, amount: float) -> None:
        self.time = time
        self.amount = amount


class SlidingWindow:
    """At most ``limit`` in any window of ``period`` seconds, wherever it begins.

    A log of the charges, not a bucket: a bucket that refills lets twice its size through in one period. Time is given
    by the caller and never goes back.

    Args:
        limit: the greatest sum.
        period: seconds.
    """

    def __init__(self, limit: float, period: float) -> None:
        self.limit = limit
        self._lifetime = period + max(period * MARGIN, MARGIN_S)
        self._charges: deque[Charge] = deque()
        self.total: float = 0.0

    def free_at(self, now: float, amount: float) -> float:
        """When there is room for ``amount``: ``now``, if there is room already; infinity if it is above the limit."""
        self._forget(now)
        excess = self.total + amount - self.limit
        if excess <= 0:
            return now
        if amount > self.limit:
            return float("inf")
        for charge in self._charges:
            excess -= charge.amount
            if excess <= 0:
                return charge.time + self._lifetime
        return now

    def used(self, now: float) -> float:
        """How much there is in the window that ends now."""
        self._forget(now)
        return self.total

    def add(self, now: float, amount: float) -> Charge:
        """Count ``amount`` at ``now``."""
        charge = Charge(now, amount)
        self._charges.append(charge)
        self.total += amount
        return charge

    def count(self, now: float, amount: float) -> None:
        """Count ``amount`` at ``now``, or a grain of time later, where it will not be corrected."""
        time = math.ceil(now * GRAINS) / GRAINS
        if self._charges and self._charges[-1].time >= time:
            self._charges[-1].amount += amount
            self.total += amount
        else:
            self.add(time, amount)

    def correct(self, now: float, charge: Charge, amount: float) -> None:
        """Let a charge count for another amount; one that has left the window counts no more."""
        self._forget(now)
        if now < charge.time + self._lifetime:
            self.total += amount - charge.amount
            charge.amount = amount

    def _forget(self, now: float) -> None:
        charges = self._charges
        while charges and charges[0].time + self._lifetime <= now:
            self.total -= charges.popleft().amount
        if not charges:
            self.total = 0.0  # no rounding errors are carried on
