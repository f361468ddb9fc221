"""Confidence intervals of shares and means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["Z95", "mean_interval", "wilson"]

Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""


def wilson(part: int, total: int, errors: float = Z95) -> tuple[float, float]:
    """Return the confidence interval of a share by Wilson's formula.

    Args:
        part: the number of successes.
        total: the number of attempts, at least 1.
        errors: half of the width of the interval, in standard errors.

    Example::

        >>> [round(end, 2) for end in wilson(12, 20)]
        [0.39, 0.78]
    """
    share, square = part / total, errors**2 / total
    spread = math.sqrt(square * (share * (1 - share) + square / 4))
    return max(0.0, (share + square / 2 - spread) / (1 + square)), min(
        1.0, (share + square / 2 + spread) / (1 + square)
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the normal confidence interval of 95 % of a mean; ``None`` with fewer than two values."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), Z95 * statistics.stdev(values) / len(values) ** 0.5
    return mean - error, mean + error
