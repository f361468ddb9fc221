"""What a judge pays for a feature alone, from the scores of the same answers with and without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from reward_loop._util.intervals import paired_interval

__all__ = ["Effect", "EffectVerdict", "effect_of"]

MIN_PAIRS = 16
"""With fewer pairs, the warning stays as it is."""

SMALL = 0.5
"""A warning is cleared only if the interval excludes larger effects, in standard deviations of the scores."""


class EffectVerdict(StrEnum):
    """What the pairs say about a warning."""

    CONFIRMED = "confirmed"
    """The judge pays for the feature alone: 0 is not in the interval."""
    CLEARED = "cleared"
    """The judge does not pay for the feature alone."""
    UNDECIDED = "undecided"
    """There are too few pairs, or the interval is too wide."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The mean difference of the scores with and without a feature."""

    pairs: int
    mean: float
    low: float
    high: float
    """The ends of the confidence interval of 95 %."""
    verdict: EffectVerdict

    def describe(self, feature: str) -> str:
        """Return the effect as a sentence."""
        if not self.pairs:
            return f"No answer with and without {feature} has both scores: the warning is undecided."
        size = f"{self.mean:+.2g} ({self.low:.2g} to {self.high:.2g}, {self.pairs} pairs of answers)"
        return f"The judge pays {size} for {feature} alone: the warning is {self.verdict}."


def effect_of(pairs: Sequence[tuple[float, float]], sign: int = 1) -> Effect:
    """Return the effect of a feature, and what it says about a warning.

    Args:
        pairs: for each answer, its score without the feature, and with it.
        sign: the direction of the warning: -1 if the reward falls with the feature.
    """
    if not pairs:
        return Effect(0, 0.0, 0.0, 0.0, EffectVerdict.UNDECIDED)
    differences = [having - without for without, having in pairs]
    scores = [score for pair in pairs for score in pair]
    span = max(scores) - min(scores)
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences) if len(pairs) > 1 else 0.0
    low, high = paired_interval(len(pairs), mean, spread, span)
    near, far = sorted((sign * low, sign * high))
    if len(pairs) < MIN_PAIRS:
        verdict = EffectVerdict.UNDECIDED
    elif near > 0:
        verdict = EffectVerdict.CONFIRMED
    else:
        verdict = EffectVerdict.CLEARED if far <= SMALL * statistics.pstdev(scores) else EffectVerdict.UNDECIDED
    return Effect(len(pairs), mean, low, high, verdict)
