"""Confidence intervals of shares."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["FALSE_ACCEPT", "WeightedShare", "wilson"]

Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""

FALSE_ACCEPT = "false_accept"
"""The component of a spot check whose strong judge rejects the answer: 1 if the cheap judge accepts it, else 0."""


class WeightedShare:
    """The share of positive ones in a random selection, each weighted with 1 / its chance to be selected (Hajek)."""

    def __init__(self) -> None:
        self._weights = self._squares = self._positive = 0.0

    def add(self, positive: bool, chance: float) -> None:
        """Add a selected one."""
        self._weights += 1 / chance
        self._squares += 1 / chance**2
        self._positive += positive / chance

    @property
    def count(self) -> int:
        """The number of selected ones; with unequal chances, the smaller number that tells as much (Kish)."""
        return round(self._weights**2 / self._squares) if self._weights else 0

    @property
    def positive(self) -> int:
        """The share of `count` that is positive, as a number."""
        return round(self.count * self._positive / self._weights) if self._weights else 0

    def to_dict(self) -> dict[str, Any]:
        """Return ``count``, ``value`` and ``interval``, of 95 %, as values of JSON; the latter may be ``None``."""
        if not self._weights:
            return {"count": 0, "value": None, "interval": None}
        share = self._positive / self._weights
        return {"count": self.count, "value": share, "interval": wilson(share * self.count, self.count)}


def wilson(part: float, total: int) -> tuple[float, float]:
    """Return the confidence interval of 95 % of a share by Wilson's formula.

    Args:
        part: the number of successes.
        total: the number of attempts, at least 1.

    Example::

        wilson(12, 20)  # 0.39 to 0.78
    """
    # Not the normal approximation: for a share of 0 or 1, its interval has no width.
    share, square = part / total, Z95**2 / total
    spread = math.sqrt(square * (share * (1 - share) + square / 4))
    return max(0.0, (share + square / 2 - spread) / (1 + square)), min(
        1.0, (share + square / 2 + spread) / (1 + square)
    )
