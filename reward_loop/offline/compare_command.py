"""The command ``reward-loop compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console
from reward_loop._util.text import counted, cut, rounded
from reward_loop.errors import ConfigError
from reward_loop.offline.compare import MAX_CATEGORIES, Agreement, Scoring, ScoringDifference, read_scoring
from reward_loop.offline.compare import compare as compare_scorings

__all__ = ["compare"]

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
    if label is not None and not first.labels and not second.labels:
        raise ConfigError(f"--label: neither {a} nor {b} has a field {label!r} with a number")
    found = compare_scorings(first, second, threshold=threshold, largest=largest)
    if as_json:
        print(encode(found.to_dict()).decode())
    else:
        _show(found, label, console())
    for scoring in (first, second):
        _note_duplicates(scoring)


def _show(found: ScoringDifference, label: str | None, out: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("samples", f"{found.both} in both, {found.only_a} only in A, {found.only_b} only in B")
    table.add_row("changed", f"{found.changed} of {found.both}")
    for (before, after), count in sorted(found.outcomes.items()):
        if before != after:
            table.add_row("", f"{count} {before} in A, {after} in B")
    table.add_row("mean score", f"A {_number(found.mean_a)}, B {_number(found.mean_b)}")
    out.print(table)
    out.print()
    rows = {"A and B": found.agreement}
    if found.label_a is not None and found.label_b is not None:
        rows |= {f"A and {label}": found.label_a, f"B and {label}": found.label_b}
    _show_agreement(rows, out)
    _show_samples("largest differences", [(key, _number(a), _number(b)) for key, a, b in found.largest], out)
    _show_samples("changed outcomes", found.moved, out)


def _show_samples(title: str, rows: Sequence[tuple[Any, str, str]], out: Console) -> None:
    """Print a table of samples with a value in A and in B; nothing without rows."""
    if not rows:
        return
    out.print()
    table = Table(title, "A", "B", box=None, pad_edge=False)
    for key, a, b in rows:
        table.add_row(escape(cut(str(key), 60)), escape(a), escape(b))
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


def _number(value: float | None) -> str:
    return "-" if value is None else rounded(value)


def _note_duplicates(scoring: Scoring) -> None:
    if scoring.duplicates:
        console(stderr=True).print(
            f"note: {escape(str(scoring.path))} has {counted(scoring.duplicates, 'record')} with the {scoring.key} of "
            "another one: the latest counts"
        )
