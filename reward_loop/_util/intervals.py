"""Confidence intervals of shares, and of means of paired differences."""

from __future__ import annotations

import math

__all__ = ["Z95", "paired_interval", "wilson"]

Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""


def wilson(part: int, total: int, errors: float = Z95) -> tuple[float, float]:
    """Return the confidence interval of a share by Wilson's formula.

    Args:
        part: the number of successes.
        total: the number of attempts, at least 1.
        errors: half of the width of the interval, in standard errors.

    Example::

        wilson(12, 20)  # 0.39 to 0.78
    """
    share, square = part / total, errors**2 / total
    spread = math.sqrt(square * (share * (1 - share) + square / 4))
    return max(0.0, (share + square / 2 - spread) / (1 + square)), min(
        1.0, (share + square / 2 + spread) / (1 + square)
    )


def paired_interval(count: int, mean: float, spread: float, span: float) -> tuple[float, float]:
    """Return the confidence interval of 95 % of the mean difference of paired scores.

    Two pairs are added as Agresti and Min do for shares: half of each of the differences ``span``, ``-span``, 0 and 0.
    So equal differences in all pairs, which few pairs may have by chance, do not give an interval without a width.

    Args:
        count: the number of pairs, at least 1.
        mean: the mean difference.
        spread: the standard deviation of the differences, with ``count - 1``; 0 for one pair.
        span: the range of the scores.

    Example::

        paired_interval(64, 0.31, 0.28, 1.0)  # 0.22 to 0.38
    """
    total = count + 2
    squares = (count - 1) * spread**2 + count * mean**2 + span**2
    middle = count * mean / total
    error = Z95 * math.sqrt(max(0.0, squares / total - middle**2) / total)
    return middle - error, middle + error
