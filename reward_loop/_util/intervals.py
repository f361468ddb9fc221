"""Confidence intervals of shares."""

from __future__ import annotations

import math

__all__ = ["Z95", "wilson"]

Z95 = 1.96
"""The 97.5 % quantile of the normal distribution, for confidence intervals of 95 %."""


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
