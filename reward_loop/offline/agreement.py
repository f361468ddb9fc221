"""Agreement of two lists of scores: correlation, share of equal scores, Cohen's kappa."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Agreement", "agreement", "cohens_kappa", "pearson", "spearman"]

MAX_CATEGORIES = 20
"""With more different scores than this, they are not categories, and there is no kappa."""

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two lists of scores agree. A field is ``None`` if it is not defined for the scores."""

    pairs: int
    equal: float | None
    """The share of pairs whose scores are equal; with a threshold, of pairs on the same side of it."""
    kappa: float | None
    """Cohen's kappa, where each score is a category; with a threshold, each side of it."""
    pearson: float | None
    """The linear correlation of the scores."""
    spearman: float | None
    """The correlation of their ranks; equal scores share the mean of their ranks."""


def agreement(pairs: Sequence[Pair], threshold: float | None = None) -> Agreement:
    """Return how the two scores of each pair agree.

    With a threshold, scores of at least this number are one category for `Agreement.equal` and `Agreement.kappa`, and
    all others are the other one.
    """
    categories = pairs if threshold is None else [(float(x >= threshold), float(y >= threshold)) for x, y in pairs]
    equal = sum(x == y for x, y in categories) / len(pairs) if pairs else None
    return Agreement(len(pairs), equal, cohens_kappa(categories), pearson(pairs), spearman(pairs))


def cohens_kappa(pairs: Sequence[Pair]) -> float | None:
    """Return ``(p_o - p_e) / (1 - p_e)``: the agreement beyond that expected of independent scores.

    ``None`` if there is only one category, so that the expected agreement is 1, or if there are too many.
    """
    first, second = Counter(x for x, _ in pairs), Counter(y for _, y in pairs)
    if not pairs or len(first.keys() | second.keys()) > MAX_CATEGORIES:
        return None
    count = len(pairs)
    observed = sum(x == y for x, y in pairs) / count
    expected = sum(first[value] * second[value] for value in first) / count**2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def pearson(pairs: Sequence[Pair]) -> float | None:
    """Return the linear correlation; ``None`` for fewer than two pairs, or if one of the lists is constant."""
    try:
        return statistics.correlation([x for x, _ in pairs], [y for _, y in pairs])
    except statistics.StatisticsError:
        return None


def spearman(pairs: Sequence[Pair]) -> float | None:
    """Return the correlation of the ranks; ``None`` as for `pearson`."""
    return pearson(list(zip(_ranks([x for x, _ in pairs]), _ranks([y for _, y in pairs]), strict=True)))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]
