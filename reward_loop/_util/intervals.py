"""Confidence intervals of shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["FALSE_ACCEPT", "Z95", "WeightedShare", "wilson"]

Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""

FALSE_ACCEPT = "false_accept"
"""The component of a spot check whose strong judge rejects the answer: 1 if the cheap judge accepts it, else 0."""


@dataclass
class WeightedShare:
    """The share of positive ones in a random selection, each weighted with 1 / its chance to be selected (Hajek)."""

    weights: float = 0.0
    squares: float = 0.0
    positive: float = 0.0

    def add(self, positive: bool, chance: float) -> None:
        """Add a selected one."""
        self.weights += 1 / chance
        self.squares += 1 / chance**2
        self.positive += positive / chance

    def __add__(self, other: WeightedShare) -> WeightedShare:
        sums = (self.weights + other.weights, self.squares + other.squares, self.positive + other.positive)
        return WeightedShare(*sums)

    def to_dict(self) -> dict[str, Any]:
        """Return ``count``, ``value`` and ``interval``, of 95 %, as values of JSON; the latter may be ``None``."""
        if not self.weights:
            return {"count": 0, "value": None, "interval": None}
        # With unequal chances, the smaller number that tells as much (Kish).
        share, count = self.positive / self.weights, round(self.weights**2 / self.squares)
        return {"count": count, "value": share, "interval": wilson(share * count, count)}


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
