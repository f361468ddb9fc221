"""The error that spot checks add to advantages, and the share of strong calls that keeps it within a bound.

A sample that is checked with the chance p has the reward ``c + (s - c) Z / p``, where Z is 1 with the chance p, else 0:
the strong score s plus an error with the mean 0 and the variance ``(s - c)^2 (1 - p) / p``. The advantage is the reward
minus the mean of n of them, so its error has the mean square ``(1 - 1/n) E[(s - c)^2] (1 - p) / p``. That of the
advantage itself is ``(1 - 1/n) V``, where V is the variance of the strong scores of answers to a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import NamedTuple

__all__ = ["MOST_ERROR", "SMALLEST", "Gap", "advice"]

MOST_ERROR = 2.0
"""The advised share keeps the error of advantages within this number of standard deviations of the advantages. It is
our choice: a step then tells as much as a fifth of its samples with the strong judge."""

SMALLEST = 0.15
"""The smallest share that is advised: answers on which the judges differ become more frequent during a training."""


class Gap(NamedTuple):
    """How far the scores of a cheap judge are from those of a strong one."""

    square: float
    """The mean squared difference of both scores of an answer."""
    variance: float
    """The variance of the strong judge's scores."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Gap:
        """Return the gap of at least two pairs of a cheap and a strong score."""
        return cls(fmean((strong - cheap) ** 2 for cheap, strong in pairs), variance(strong for _, strong in pairs))

    def error(self, share: float, size: int) -> float:
        """Return the root mean square of the error of an advantage that is not divided by a standard deviation.

        Args:
            share: the share of samples that are checked.
            size: the number of samples of a group.
        """
        return math.sqrt((1 - 1 / size) * self.square * (1 - share) / share)

    def relative_error(self, share: float) -> float:
        """Return this error in standard deviations of the advantages, which depends on no group size."""
        return math.sqrt(self.square * (1 - share) / share / self.variance) if self.variance else math.inf

    def share(self, most: float = MOST_ERROR) -> float:
        """Return the smallest share with a relative error of at most `most`."""
        if not self.square:
            return SMALLEST
        return max(SMALLEST, self.square / (self.square + most**2 * self.variance))


def advice(pairs: Sequence[tuple[float, float]], what: str) -> str | None:
    """Return how a cheap judge differs from a strong one and what share to check; ``None`` if the pairs do not tell.

    Args:
        pairs: the scores of the cheap and of the strong judge.
        what: what the pairs are, for the text.
    """
    if len(pairs) < 2 or not (gap := Gap.of(pairs)).variance:
        return None
    different = sum(cheap != strong for cheap, strong in pairs)

    def worth(share: float) -> str:
        error = gap.relative_error(share)
        return f"{error:.2g} standard deviations, so a step tells as much as {1 / (1 + error**2):.0%} of its samples"

    share = math.ceil(gap.share() * 100) / 100
    return (
        f"the judges differ on {different} of {len(pairs)} {what}. Spot checks of 20% of the samples add an error to "
        f"advantages: {worth(0.2)}. Advised: share={share:g} ({worth(share)})"
    )
