"""The command ``reward-loop report``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import WIDE, console
from reward_loop._util.text import counted, did_you_mean, duration, listing, rounded
from reward_loop.errors import ConfigError
from reward_loop.offline import cli_options
from reward_loop.offline.report import SHOWN, Report
from reward_loop.records import Price, RecordsReader, health, hidden_share, overlaps

_PARTS = 30
"""The largest number of rows of a table, and of warnings."""

_SPREAD = ("mean", "std", "min", "p50", "p95", "max")

Values = Mapping[str, Any]


def report(
    folder: cli_options.RecordsFolder,
    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Also count by the values of a field of the rows, e.g. [cyan]data_source[/], [cyan]step[/] or "
            "[cyan]components.acc[/].",
        ),
    ] = None,
    price: cli_options.Price = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Summarise the records of a run, also while it runs.

    Shows the outcomes with the causes of failures, the scores, the components,
    the groups whose rewards are all equal or missing, the latency and the
    failures of judges, the slowest and the costliest samples, and of a verl run
    the warnings of its live numbers.
    docs/viewer.md describes the summary.
    """
    out = console()
    prices = Price.parse(price)
    reader, found, fields = RecordsReader(folder), Report(group_by), set[str]()
    for row in reader.rows():
        found.add(row)
        if group_by is not None:
            fields |= row.keys() | {f"components.{name}" for name in row.get("components") or ()}
    has_parts = found.parts or (found.validation and found.validation.parts)
    if group_by is not None and (found.samples or found.validation) and not has_parts:
        raise ConfigError(
            f"--group-by: no row has a field {group_by!r}{did_you_mean(group_by, fields) or '.'} Known: "
            f"{listing(fields)}"
        )
    warnings, overlap = health(folder), overlaps(folder)
    if as_json:
        print(encode({**found.to_dict(prices), "overlap": overlap, "warnings": warnings}).decode())
    else:
        show_report(found, out, prices)
        _show_overlap(overlap, out)
        _show_warnings(warnings, out)
    if reader.incomplete:
        console(stderr=True).print(
            f"note: {counted(reader.incomplete, 'incomplete line')} left out: of processes that were killed, or that "
            "are writing"
        )


def show_report(report: Report, out: Console, price: Price | None = None) -> None:
    """Print the whole summary, training and validation apart; with a price, also the costs of judges."""
    if report.validation is None or report.samples:
        if report.validation is not None:
            out.print("[bold]Training[/]")
        _show_samples(report, out, price)
    if report.validation is not None:
        out.print("\n[bold]Validation[/]" if report.samples else "[bold]Validation[/]")
        _show_samples(report.validation, out, price)


def _show_samples(report: Report, out: Console, price: Price | None) -> None:
    found = report.to_dict(price)
    table = Table.grid(padding=(0, 2))
    table.add_row("samples", str(found["samples"]))
    table.add_row("outcomes", outcomes_of(report))
    table.add_row("score", _spread(found["score"]))
    table.add_row("reward", _spread(found["reward"]))
    table.add_row("masked", str(found["masked"]))
    if found["stopped"]:
        table.add_row("stopped", f"{found['stopped']}, without a reward: the policy ended the run")
    slowest = ", ".join(f"{one['sample']} {duration(one['seconds'])}" for one in found["slowest"])
    table.add_row("slowest", escape(slowest) or "none")
    if found["reported_cost"] is not None:
        table.add_row("cost", f"{rounded(found['reported_cost'])}, as reported by functions")
    out.print(table)
    _show_causes("failed", found["causes"], out)
    _show_causes("unscored", found["unscored_causes"], out)
    if found["components"]:
        rows = [(name, *map(values.get, ("count", *_SPREAD))) for name, values in found["components"].items()]
        show_table(("component", "count", *_SPREAD), rows, out)
    if found["groups"]:
        out.print(
            f"\n{counted(found['groups'], 'group')}: {found['zero_variance']} with equal rewards, "
            f"{found['all_failed']} without a reward, {found['partly_failed']} with a reward for some samples only"
        )
    if (accepts := found["false_accepts"])["count"]:
        low, high = accepts["interval"]
        out.print(
            f"\nspot checks: the cheap judge accepted {accepts['value']:.1%} of {counted(accepts['count'], 'answer')} "
            f"that the strong judge rejects (95 % interval {low:.1%} to {high:.1%})"
        )
    _show_judges(found["judges"], price is not None, out)
    if found["costliest"]:
        shown = ", ".join(f"{one['sample']} {one['tokens']:,}" for one in found["costliest"])
        out.print(f"most tokens: {escape(shown)}")
    if report.group_by is not None:
        _show_parts(found, out)


def _show_overlap(overlap: Sequence[Values], out: Console) -> None:
    """Print the share of judging that was hidden, over all steps and in the last one."""
    if not overlap:
        return
    waiting, pending = (math.fsum(step[name] for step in overlap) for name in ("waiting_s", "pending_s"))
    shares = [hidden_share(waiting, pending), overlap[-1]["hidden_share"]]
    total, last = ("nothing was pending" if share is None else f"{share:.1%}" for share in shares)
    out.print(f"\njudging hidden: {total} in {counted(len(overlap), 'step')}, {last} in the last one")


def _show_warnings(warnings: Sequence[Values], out: Console) -> None:
    """Print the warnings of the live numbers."""
    if not warnings:
        return
    out.print(f"\n{counted(len(warnings), 'warning')} of the live numbers (reward_loop.health):")
    for warning in warnings[:_PARTS]:
        step = "" if warning["step"] is None else f"step {warning['step']}, "
        message = f"{step}{warning['monitor']}: {warning['message']}"
        out.print(f"- {escape(message)}")
    _note_more(warnings, out)


def outcomes_of(report: Report) -> str:
    """Return the counts of outcomes, such as ``1 failed, 5 scored``."""
    return ", ".join(f"{report.outcomes[name]} {name}" for name in sorted(report.outcomes)) or "none"


def _spread(values: Values) -> str:
    if not values["count"]:
        return "none"
    return ", ".join(f"{name} {rounded(values[name])}" for name in _SPREAD) + f", of {values['count']}"


def _show_causes(outcome: str, causes: Sequence[Values], out: Console) -> None:
    if not causes:
        return
    out.print(f"\n{sum(cause['count'] for cause in causes)} {outcome}, of {counted(len(causes), 'cause')}:")
    for cause in causes[:SHOWN]:
        out.print(f"- {counted(cause['count'], 'time')}, first: {escape(cause['example'])}")
    if len(causes) > SHOWN:
        out.print(f"- and {counted(len(causes) - SHOWN, 'other cause')}")


def _show_judges(judges: Mapping[str, Values], with_cost: bool, out: Console) -> None:
    columns = ["judge", "requests", "errors", "no\nverdict", "p50 s", "p95 s", "max s", "tokens"]
    rows = []
    for name, judge in judges.items():
        counts = (judge[key] for key in ("requests", "errors", "no_verdict"))
        times = (judge["seconds"][key] for key in ("p50", "p95", "max"))
        cost = (judge["cost"],) if with_cost else ()
        rows.append((name, *counts, *times, f"{judge['prompt_tokens'] + judge['completion_tokens']:,}", *cost))
    if rows:
        show_table([*columns, "cost"] if with_cost else columns, rows, out)


def _show_parts(found: Values, out: Console) -> None:
    rows = []
    has_checks = bool(found["false_accepts"]["count"])
    for part in found["parts"][:_PARTS]:
        outcomes = (part["outcomes"].get(name, 0) for name in ("scored", "unscored", "failed"))
        means = part["score"]["mean"], part["score"]["std"], part["reward"]["mean"]
        accepts = (part["false_accepts"]["value"],) if has_checks else ()
        rows.append((part["value"], part["samples"], *outcomes, *means, *accepts))
    columns = ["samples", "scored", "unscored", "failed", "mean\nscore", "std", "mean\nreward"]
    if has_checks:
        columns.append("false\naccepts")
    show_table((found["by"], *columns), rows, out)
    _note_more(found["parts"], out)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], out: Console) -> None:
    """Print a table of numbers, each row of which begins with its name."""
    table = Table(box=None, pad_edge=False)
    table.add_column(escape(columns[0]), overflow="fold", min_width=12)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, *values in rows:
        table.add_row(escape(str(name)), *map(_number, values))
    out.print()
    # On a narrow terminal, names are folded, and lines may be longer than it is wide: a cut number is another number.
    needed = Measurement.get(out, out.options.update(max_width=WIDE), table).minimum
    out.print(table, width=max(out.width, needed))


def _number(value: float | str | None) -> str:
    return "-" if value is None else rounded(value) if isinstance(value, float) else str(value)


def _note_more(items: Sequence[Any], out: Console) -> None:
    if len(items) > _PARTS:
        out.print(f"and {len(items) - _PARTS} more; --json prints all")
