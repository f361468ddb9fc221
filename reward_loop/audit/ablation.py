"""A feature of answers that a judge may pay for: the same answer with and without it, and how much the judge pays."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from reward_loop._util.intervals import paired_interval
from reward_loop._util.text import cut

LENGTH = "length"

MAX_NAME = 80
"""The largest number of characters of a feature's name."""

_BREAKS = re.compile(r"\n+|(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])")
"""Between two sentences or lines: a phrase in another place could break a formula or a word."""


@dataclass(frozen=True, slots=True)
class Feature:
    """What is inserted into an answer, or removed from it."""

    phrase: str | None = None
    """The phrase; ``None`` for the length of the answer."""

    @property
    def name(self) -> str:
        """The name in records: the start of the phrase, or `LENGTH`."""
        return LENGTH if self.phrase is None else cut(repr(self.phrase), MAX_NAME)

    def place(self, answers: Sequence[str]) -> float:
        """Return where answers have the phrase: the median of its place, from 0 at the start to 1 at the end."""
        phrase = self.phrase or ""
        found = [answer.find(phrase) / max(1, len(answer) - len(phrase)) for answer in answers if phrase in answer]
        return statistics.median(found) if found else 0.0

    def choose(self, answers: Sequence[str], most: int, generator: random.Random) -> list[int]:
        """Return the positions of some answers: half of them with the phrase, as far as there are enough.

        In most answers, an exploit may be without effect, such as a phrase that a judge accepts as the whole answer.

        Args:
            answers: the answers.
            most: the largest number of positions.
            generator: chooses among the answers.
        """
        order = generator.sample(range(len(answers)), len(answers))
        having = [i for i in order if self.phrase is not None and self.phrase in answers[i]]
        others = [i for i in order if self.phrase is None or self.phrase not in answers[i]]
        half = max(most // 2, most - len(others))
        chosen = having[:half]
        return chosen + others[: most - len(chosen)]

    def change(self, answer: str, place: float) -> tuple[str, bool]:
        """Return the answer without the feature if it has it, else with it; and whether it now has the feature.

        A phrase is removed wherever it occurs, or inserted once between two sentences. The length only grows: the first
        half of the answer stands twice, which adds no content and keeps the end, with the result.

        Args:
            answer: the answer.
            place: where to insert a phrase, see `place`.
        """
        if self.phrase is None:
            half = answer[: _nearest(answer, 0.5)] or answer
            return f"{half.rstrip()}\n\n{answer}", True
        if self.phrase in answer:
            # With the space before it, since insertion adds one.
            return re.sub(r"[^\S\n]*" + re.escape(self.phrase), "", answer), False
        at = _nearest(answer, place)
        before, after = answer[:at], answer[at:]
        left = "" if not before or before[-1].isspace() else " "
        right = "" if not after or after[0].isspace() else " "
        return f"{before}{left}{self.phrase}{right}{after}", True


@dataclass
class AblationCount:
    """The probes of one feature that have ended."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    """For each answer: its score without the feature, and with it."""
    failed: int = 0
    """The number of answers without a second score."""


def _nearest(answer: str, place: float) -> int:
    """Return the position between two sentences that is nearest to a place; start and end also count."""
    breaks = [0, *(found.end() for found in _BREAKS.finditer(answer)), len(answer)]
    return min(breaks, key=lambda position: abs(position - place * len(answer)))


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
