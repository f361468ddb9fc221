"""Compares two scorings of the same samples: changes, and how the scores agree."""

from __future__ import annotations

import heapq
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.records import RecordsReader
from reward_loop.types import Outcome, finite_number

__all__ = [
    "Agreement",
    "Scoring",
    "ScoringDifference",
    "agreement",
    "cohens_kappa",
    "compare",
    "pearson",
    "read_scoring",
    "spearman",
]

MAX_CATEGORIES = 20
"""With more different scores than this, they are not categories, and there is no kappa."""

Pair = tuple[float, float]


@dataclass(slots=True)
class Scoring:
    """The scores of one scoring, by the key of the sample."""

    path: Path
    key: str
    """The field of the keys."""
    outcomes: dict[Any, str] = field(default_factory=dict)
    scores: dict[Any, float] = field(default_factory=dict)
    """The scores of the scored samples."""
    labels: dict[Any, float] = field(default_factory=dict)
    duplicates: int = 0
    """Records whose key another record has, too: the latest counts."""


@dataclass(frozen=True, slots=True)
class ScoringDifference:
    """How two scorings, ``a`` and ``b``, differ."""

    both: int
    """Samples in both."""
    only_a: int
    only_b: int
    changed: int
    """Samples in both whose outcome or score differs."""
    outcomes: dict[tuple[str, str], int]
    """The number of samples with each pair of outcomes."""
    mean_a: float | None
    mean_b: float | None
    """The mean scores of the samples that were scored in both."""
    agreement: Agreement
    label_a: Agreement | None
    """The agreement of ``a`` with the label; ``None`` without a label."""
    label_b: Agreement | None
    largest: list[tuple[Any, float, float]]
    """Key and both scores of the samples whose scores differ most, the largest difference first."""
    moved: list[tuple[Any, str, str]]
    """Key and both outcomes of the first samples whose outcome differs; at most as many as in `largest`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values of JSON."""
        found = asdict(self)
        found["outcomes"] = [{"a": a, "b": b, "samples": n} for (a, b), n in self.outcomes.items()]
        for name in ("largest", "moved"):
            found[name] = [{"sample": key, "a": a, "b": b} for key, a, b in found[name]]
        return found


def read_scoring(path: Path, *, on: str | None = None, label: str | None = None) -> Scoring:
    """Read a scoring, which is a folder of records.

    Args:
        path: the folder.
        on: the field that names a sample in both scorings; by default ``uid``.
        label: a field with a number to compare the scores with, such as ``extra_info.label``.

    Raises:
        ConfigError: there are no such records, the field `on` is missing, or a label is not a number.
    """
    scoring = Scoring(path, on or "uid")
    fields: set[str] = set()
    times: dict[Any, float] = {}
    keyless = 0
    for row in _records(path, label):
        fields |= row.keys()
        key = look_up(row, scoring.key)
        if key is MISSING or key is None or isinstance(key, dict | list):
            keyless += 1
            continue
        scoring.duplicates += key in scoring.outcomes
        scored = row.get("time") or 0.0  # the files are in no order
        if scored < times.get(key, 0.0):
            continue
        times[key] = scored
        _add(scoring, key, row, None if label is None else look_up(row, label), label)
    if keyless:
        hint = did_you_mean(scoring.key, fields - {scoring.key}) or "."
        raise ConfigError(
            f"{path}: {keyless} records have no value in the field {scoring.key!r}{hint} Their "
            f"fields are {listing(fields)}: name the one that identifies a sample in both by --on"
        )
    return scoring


def compare(a: Scoring, b: Scoring, *, threshold: float | None = None, largest: int = 10) -> ScoringDifference:
    """Compare two scorings of the same samples; see `agreement` for the threshold.

    `ScoringDifference.largest` and `ScoringDifference.moved` have at most ``largest`` samples.

    Raises:
        ConfigError: no sample is in both.
    """
    keys = [key for key in a.outcomes if key in b.outcomes]
    if not keys:
        raise ConfigError(
            f"{a.path} and {b.path} have no sample in common: the first has {a.key}={_example(a)}, the second "
            f"{b.key}={_example(b)}. Name a field with the same values in both by --on"
        )
    pairs = {key: (a.scores[key], b.scores[key]) for key in keys if key in a.scores and key in b.scores}
    labels = {**b.labels, **a.labels}
    different = ((abs(x - y), key) for key, (x, y) in pairs.items() if x != y)
    moved = ((key, a.outcomes[key], b.outcomes[key]) for key in keys if a.outcomes[key] != b.outcomes[key])
    top = heapq.nlargest(largest, different, key=lambda found: found[0])
    return ScoringDifference(
        both=len(keys),
        only_a=len(a.outcomes) - len(keys),
        only_b=len(b.outcomes) - len(keys),
        changed=sum((a.outcomes[key], a.scores.get(key)) != (b.outcomes[key], b.scores.get(key)) for key in keys),
        outcomes=dict(Counter((a.outcomes[key], b.outcomes[key]) for key in keys)),
        mean_a=_mean([x for x, _ in pairs.values()]),
        mean_b=_mean([y for _, y in pairs.values()]),
        agreement=agreement(list(pairs.values()), threshold),
        label_a=agreement(_labelled(a, labels), threshold) if labels else None,
        label_b=agreement(_labelled(b, labels), threshold) if labels else None,
        largest=[(key, *pairs[key]) for _, key in top],
        moved=list(islice(moved, largest)),
    )


def _records(path: Path, label: str | None) -> Iterator[Mapping[str, Any]]:
    reader = RecordsReader(path)
    for row in reader.rows():
        # Texts are in other files: they are read only for a field that the row lacks.
        yield row if label is None or look_up(row, label) is not MISSING else {**(reader.text(row) or {}), **row}


def _add(scoring: Scoring, key: Any, row: Mapping[str, Any], label: Any, name: str | None) -> None:
    score = row.get("score")
    scoring.outcomes[key] = row.get("outcome") or str(Outcome.UNSCORED if score is None else Outcome.SCORED)
    scoring.scores.pop(key, None)
    if score is not None and scoring.outcomes[key] == Outcome.SCORED:
        finite = finite_number(score) if isinstance(score, int | float) else None
        if finite is None:
            raise ConfigError(f"{scoring.path}: the score of sample {key} is {shorten(score)}, which is not a number")
        scoring.scores[key] = finite
    if label is not MISSING and label is not None:
        try:
            number = float(label)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"{scoring.path}: the label {name!r} of sample {key} is {shorten(label)}, which is not a number"
            )
        scoring.labels[key] = number


def _labelled(scoring: Scoring, labels: Mapping[Any, float]) -> list[Pair]:
    return [(score, labels[key]) for key, score in scoring.scores.items() if key in labels]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _example(scoring: Scoring) -> str:
    return shorten(next(iter(scoring.outcomes), None), 60)


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
