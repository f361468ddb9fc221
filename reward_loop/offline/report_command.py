"""The command ``reward-loop report``, and the summary with which ``score`` ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import WIDE, console, printable
from reward_loop._util.text import counted, rounded
from reward_loop.errors import ConfigError
from reward_loop.records import health, hidden_share

_ROWS = 30
"""The largest number of rows of a table."""

_SPREAD = ("mean", "std", "min", "p50", "p95", "max")

Values = Mapping[str, Any]


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="A folder of records, or two to compare.", show_default=False),
    ],
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Also count by the values of a field of the samples, e.g. [cyan]data_source[/], [cyan]step[/] or "
            "[cyan]components.acc[/].",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Summarise the records of a run, also while it runs, or compare two.

    Shows the outcomes with the causes of failures, the scores, the components,
    the groups whose rewards are all equal or missing, the latency and the
    failures of judges, and of a verl run the warnings of its live numbers. Two
    folders are joined by the uids of their samples: two functions on the same
    samples, as "score" writes them, or two runs.

    docs/viewer.md describes the summary.

    [bold]Example[/]

      reward-loop report checkpoints/rewards checkpoints/rewards.scored
    """
    # Here: DuckDB takes a while to import, and other commands do not need it.
    from reward_loop.index import questions
    from reward_loop.index.index import open_index
    from reward_loop.index.phases import StepTimes

    out = console()
    if len(folders) > 2:
        raise ConfigError(f"report: {len(folders)} folders are given: name one, or two to compare")
    with open_index(folders[0]) as index:
        if len(folders) == 2:
            with open_index(folders[1]) as other:
                by = group_by or ("step" if questions.run(index)["steps"] else "data_source")
                compared = questions.compare(index, other, by)
            if as_json:
                print(encode(compared).decode())
            else:
                show_comparison(compared, folders, out)
            return
        found = questions.report(index, group_by)
        times, incomplete = StepTimes(folders[0]).steps(questions.resumed(index)), index.incomplete
    warnings = health(folders[0])
    overlap = [{"step": step, **row, "phases": None} for step, row in times.items() if row["pending_s"] is not None]
    if as_json:
        print(encode({**found, "overlap": overlap, "warnings": warnings}).decode())
    else:
        show_report(found, out)
        _show_run(overlap, warnings, out)
    if incomplete:
        console(stderr=True).print(
            f"note: {counted(incomplete, 'incomplete line')} left out: of processes that were killed, or that "
            "are writing"
        )


def summary_of(folder: Path) -> dict[str, Any]:
    """Return the summary of a folder."""
    from reward_loop.index import questions
    from reward_loop.index.index import open_index

    with open_index(folder) as index:
        return questions.report(index)


def show_report(found: Values, out: Console) -> None:
    """Print a summary of `questions.report`, training and validation apart."""
    validation = found["validation"]
    parts = [("Training", found)] if found["samples"] or validation is None else []
    for name, part in [*parts, *([("Validation", validation)] if validation is not None else [])]:
        if validation is not None:
            out.print(f"[bold]{name}[/]")
        _show_samples(part, out)


def _show_samples(found: Values, out: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("samples", str(found["samples"]))
    table.add_row("outcomes", outcomes_of(found))
    for name in ("score", "reward"):
        values = ", ".join(f"{one} {_number(found[name][one])}" for one in _SPREAD)
        table.add_row(name, f"{values}, of {found[name]['count']}")
    table.add_row("masked", str(found["masked"]))
    if found["stopped"]:
        table.add_row("stopped", f"{found['stopped']}, without a reward: the policy ended the run")
    if found["reported_cost"] is not None:
        table.add_row("cost", f"{rounded(found['reported_cost'])}, as reported by functions")
    out.print(table)
    for cause in found["causes"][:_ROWS]:
        out.print(f"- {counted(cause['count'], 'sample')} {cause['outcome']}, first: {escape(cause['example'])}")
    columns = ("count", "mean", "std", "min", "max")
    rows = [(name, *map(values.get, columns)) for name, values in found["components"].items()]
    show_table(("component", *columns), rows, out)
    if found["groups"]:
        out.print(
            f"\n{counted(found['groups'], 'group')}: {found['zero_variance']} with equal rewards, "
            f"{found['all_failed']} without a reward, {found['partly_failed']} with a reward for some samples only"
        )
    show_table(("judge", *_JUDGES), map(_judge, found["judges"]), out)
    if "parts" in found:
        show_table((found["by"], *_OF_PART), map(_part, found["parts"]), out)
    out.print()


_JUDGES = ("requests", "errors", "no\nverdict", "asked\nagain", "p50 s", "p95 s", "max s", "tokens")
_OF_PART = ("samples", "scored", "unscored", "failed", "mean\nscore", "std", "mean\nreward")


def _judge(judge: Values) -> tuple[Any, ...]:
    name = " ".join(filter(None, map(judge.get, ("model", "backend", "function"))))
    shares = (f"{judge[key] / judge['requests']:.1%}" for key in ("errors", "no_verdict", "asked_again"))
    times = (judge["seconds"][key] for key in ("p50", "p95", "max"))
    return name, judge["requests"], *shares, *times, f"{judge['prompt_tokens'] + judge['completion_tokens']:,}"


def _part(part: Values) -> tuple[Any, ...]:
    outcomes = (part["outcomes"][name] for name in ("scored", "unscored", "failed"))
    score, reward = part["score"], part["reward"]
    return part["value"], part["samples"], *outcomes, score["mean"], score["std"], reward["mean"]


def outcomes_of(found: Values) -> str:
    """Return the counts of outcomes of a summary, such as ``1 failed, 5 scored``."""
    counts = found["outcomes"]
    return ", ".join(f"{counts[name]} {name}" for name in sorted(counts) if counts[name]) or "none"


def _show_run(overlap: Sequence[Values], warnings: Sequence[Values], out: Console) -> None:
    """Print the share of judging that was hidden, over all steps and in the last one, and the latest warnings."""
    if overlap:
        waiting, pending = (math.fsum(step[name] for step in overlap) for name in ("waiting_s", "pending_s"))
        shares = [hidden_share(waiting, pending), overlap[-1]["hidden_share"]]
        total, last = ("nothing was pending" if share is None else f"{share:.1%}" for share in shares)
        out.print(f"judging hidden: {total} in {counted(len(overlap), 'step')}, {last} in the last one")
    for one in warnings[-_ROWS:]:
        out.print(f"- warning of step {one['step']}, {one['monitor']}: {escape(one['message'])}")


def show_comparison(found: Values, folders: Sequence[Path], out: Console) -> None:
    """Print a comparison of `questions.compare`."""
    for name, folder in zip("AB", folders, strict=True):
        out.print(f"{name}: {escape(str(folder))}")
    if found["validate"]:
        out.print("samples of validation: A has no others")
    if found["pairs"]:
        agreement, correlation = found["agreement"], found["correlation"]
        out.print(
            f"{counted(found['pairs'], 'sample')} in both, {found['both']} with two scores: "
            f"{'none' if agreement is None else f'{agreement:.1%}'} equal, correlation {_number(correlation)}"
        )
    else:
        out.print("no sample is in both: the means of different samples are compared")
    rows = [
        (
            *("all" if part is found else part["value"], part["mean_a"], part["mean_b"], part["difference"]),
            *(None if part["interval"] is None else " to ".join(map(rounded, part["interval"])),),
            *(part["scored_a"], part["scored_b"]),
        )
        for part in [found, *found["parts"]]
    ]
    columns = ("mean\nA", "mean\nB", "B - A", "95 % interval", "scores\nA", "scores\nB")
    show_table((found["by"], *columns), rows, out)
    furthest = [(one["sample"], one["a"], one["b"], one["difference"]) for one in found["furthest"]]
    show_table(("largest differences", "A", "B", "B - A"), furthest, out)


def show_table(columns: Sequence[str], found: Iterable[Sequence[Any]], out: Console) -> None:
    """Print a table of numbers, each row of which begins with its name; nothing without rows."""
    if not (rows := list(found)):
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(escape(columns[0]), no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, *values in rows[:_ROWS]:
        # Before the table measures it: the console shows escapes, which are longer, and would be cut.
        table.add_row(escape(printable(str(name))), *map(_number, values))
    out.print()
    # On a narrow terminal, lines may be longer than it is wide: a cut name or number is another one.
    needed = Measurement.get(out, out.options.update(max_width=WIDE), table).maximum
    out.print(table, width=max(out.width, needed), soft_wrap=True)
    if len(rows) > _ROWS:
        out.print(f"and {len(rows) - _ROWS} more; --json prints all")


def _number(value: float | str | None) -> str:
    return "-" if value is None else rounded(value) if isinstance(value, float) else str(value)
