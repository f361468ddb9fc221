"""Compares two scorings of the same samples, for the viewer and the command ``reward-loop compare``: changes, and how
the scores agree."""

from __future__ import annotations

import heapq
import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.json import MISSING, encode, look_up
from reward_loop._util.standard_streams import console
from reward_loop._util.text import counted, cut, did_you_mean, listing, rounded, shorten
from reward_loop.errors import ConfigError
from reward_loop.records import RecordsReader
from reward_loop.types import Outcome, finite_number

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


def compare_scorings(
    a: Scoring, b: Scoring, *, label: str | None = None, threshold: float | None = None, largest: int = 10
) -> dict[str, Any]:
    """Compare two scorings of the same samples; see `agreement` for the threshold.

    Returns:
        values of JSON:

        - ``both``, ``only_a``, ``only_b``: the numbers of samples; ``changed``: of those in both, the ones whose
          outcome or score differs.
        - ``outcomes``: the number of ``samples`` with each pair of outcomes ``a`` and ``b``.
        - ``mean_a``, ``mean_b``: the mean scores of the samples that were scored in both.
        - ``agreement``, and ``label_a`` and ``label_b`` for each scoring and the label: an `Agreement`; ``None``
          without a label.
        - ``largest``: the scores ``a`` and ``b`` of the samples whose scores differ most, the largest difference first;
          ``moved``: both outcomes of the first samples whose outcome differs. Each at most ``largest`` samples.

    Raises:
        ConfigError: no sample is in both, or neither has the label.
    """
    labels = {**b.labels, **a.labels}
    if label is not None and not labels:
        raise ConfigError(
            f"neither {a.path} nor {b.path} has a field {label!r} with a number: choose another one by --label"
        )
    keys = [key for key in a.outcomes if key in b.outcomes]
    if not keys:
        raise ConfigError(
            f"{a.path} and {b.path} have no sample in common: the first has {a.key}={_example(a)}, the second "
            f"{b.key}={_example(b)}. Name a field with the same values in both by --on"
        )
    pairs = {key: (a.scores[key], b.scores[key]) for key in keys if key in a.scores and key in b.scores}
    outcomes = {key: (a.outcomes[key], b.outcomes[key]) for key in keys}
    different = ((abs(x - y), key) for key, (x, y) in pairs.items() if x != y)
    moved = ((key, *both) for key, both in outcomes.items() if both[0] != both[1])
    top = heapq.nlargest(largest, different, key=lambda found: found[0])
    return {
        "both": len(keys),
        "only_a": len(a.outcomes) - len(keys),
        "only_b": len(b.outcomes) - len(keys),
        "changed": sum(x != y or a.scores.get(key) != b.scores.get(key) for key, (x, y) in outcomes.items()),
        "outcomes": [{"a": x, "b": y, "samples": count} for (x, y), count in Counter(outcomes.values()).items()],
        "mean_a": _mean([x for x, _ in pairs.values()]),
        "mean_b": _mean([y for _, y in pairs.values()]),
        "agreement": agreement(list(pairs.values()), threshold),
        "label_a": agreement(_labelled(a, labels), threshold) if labels else None,
        "label_b": agreement(_labelled(b, labels), threshold) if labels else None,
        "largest": [{"sample": key, "a": pairs[key][0], "b": pairs[key][1]} for _, key in top],
        "moved": [{"sample": key, "a": x, "b": y} for key, x, y in islice(moved, largest)],
    }


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


_KIND = "a folder of records, for example of [cyan]reward-loop score[/]"


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"A scoring: {_KIND}.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another scoring of the same samples.", show_default=False)],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="The field that names a sample in both. Default: [cyan]uid[/].",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="A field with the right score to compare both with, e.g. [cyan]extra_info.label[/].",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="For agreement and kappa: scores of at least this number are one category, others another."),
    ] = None,
    largest: Annotated[
        int, typer.Option(min=0, help="How many largest differences and changed outcomes to show.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare two scorings of the same samples, for example by two judges.

    Shows how many outcomes and scores changed, the correlation of the scores,
    their agreement and Cohen's kappa, with each other and with a label, and the
    samples whose scores differ most.

    [bold]Example[/]

      reward-loop compare old new --label extra_info.correct
    """
    first, second = (read_scoring(path, on=on, label=label) for path in (a, b))
    found = compare_scorings(first, second, label=label, threshold=threshold, largest=largest)
    if as_json:
        print(encode(found).decode())
    else:
        _show(found, label, console())
    for scoring in (first, second):
        if scoring.duplicates:
            console(stderr=True).print(
                f"note: {escape(str(scoring.path))} has {counted(scoring.duplicates, 'record')} with the {scoring.key} "
                "of another one: the latest counts"
            )


def _show(found: Mapping[str, Any], label: str | None, out: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("samples", f"{found['both']} in both, {found['only_a']} only in A, {found['only_b']} only in B")
    table.add_row("changed", f"{found['changed']} of {found['both']}")
    for one in sorted(found["outcomes"], key=lambda one: (one["a"], one["b"])):
        if one["a"] != one["b"]:
            table.add_row("", f"{one['samples']} {one['a']} in A, {one['b']} in B")
    table.add_row("mean score", f"A {_number(found['mean_a'])}, B {_number(found['mean_b'])}")
    out.print(table)
    out.print()
    rows = {"A and B": found["agreement"]}
    if label is not None:
        rows |= {f"A and {label}": found["label_a"], f"B and {label}": found["label_b"]}
    _show_agreement(rows, out)
    _show_samples("largest differences", found["largest"], out)
    _show_samples("changed outcomes", found["moved"], out)


def _show_samples(title: str, rows: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print a table of samples with a value in A and in B; nothing without rows."""
    if not rows:
        return
    out.print()
    table = Table(title, "A", "B", box=None, pad_edge=False)
    for row in rows:
        table.add_row(escape(cut(str(row["sample"]), 60)), escape(_number(row["a"])), escape(_number(row["b"])))
    out.print(table)


def _show_agreement(rows: dict[str, Agreement], out: Console) -> None:
    table = Table("", box=None, pad_edge=False)
    for column in ("scored", "equal", "kappa", "Pearson", "Spearman"):
        table.add_column(column, justify="right")
    for name, values in rows.items():
        equal = "-" if values.equal is None else f"{values.equal:.1%}"
        numbers = (_number(value) for value in (values.kappa, values.pearson, values.spearman))
        table.add_row(escape(name), str(values.pairs), equal, *numbers)
    out.print(table)
    if any(values.kappa is None and values.pairs for values in rows.values()):
        out.print(
            f"Kappa is undefined for scores that are all equal, and is not computed for more than {MAX_CATEGORIES} "
            "different values: give --threshold"
        )


def _number(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else rounded(value)
