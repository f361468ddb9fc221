"""Prints the summary of scored samples to the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.text import cut, duration, rounded, shorten
from reward_loop.records.judges import Judges
from reward_loop.records.prices import NO_PRICES, Prices
from reward_loop.records.report import SHOWN, Report

__all__ = ["counted", "outcomes_of", "show_changes", "show_report", "show_warnings"]

_PARTS = 30
_NAME = 60


def show_report(report: Report, out: Console, prices: Prices = NO_PRICES) -> None:
    """Print the whole summary; with prices, also the costs of judges."""
    table = Table.grid(padding=(0, 2))
    validation = f", {report.validation} of them in validation" if report.validation else ""
    table.add_row("samples", f"{report.samples}{validation}")
    table.add_row("outcomes", outcomes_of(report))
    table.add_row("score", _spread(report.score.to_dict()))
    table.add_row("reward", _spread(report.reward.to_dict()))
    table.add_row("masked", str(report.masked))
    slowest = ", ".join(f"{cut(name, _NAME)} {duration(seconds)}" for seconds, name in report.slowest)
    table.add_row("slowest", escape(slowest) or "none")
    if report.reported_cost is not None:
        table.add_row("cost", f"{rounded(report.reported_cost)}, as reported by functions")
    out.print(table, highlight=False)
    _show_causes(report, out)
    _show_spreads("component", {name: spread.to_dict() for name, spread in report.components.items()}, out)
    groups = report.groups()
    if groups["groups"]:
        out.print(
            f"\n{counted(groups['groups'], 'group')}: {groups['zero_variance']} with equal rewards, "
            f"{groups['all_failed']} without a reward, {groups['partly_failed']} with a reward for some samples only",
            highlight=False,
        )
    _show_judges(report.judges, prices, out)
    if report.costliest:
        shown = ", ".join(f"{cut(name, _NAME)} {tokens:,.0f}" for tokens, name in report.costliest)
        out.print(f"most tokens: {escape(shown)}", highlight=False)
    if report.group_by is not None:
        _show_parts(report, out)


def show_warnings(warnings: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print the warnings of the health monitors."""
    if not warnings:
        return
    out.print(f"\n{counted(len(warnings), 'warning')} of the health monitors:", highlight=False)
    for warning in warnings[:_PARTS]:
        message = f"step {warning['step']}, {warning['monitor']}: {warning['message']}"
        out.print(f"- {escape(message)}", highlight=False)
    if len(warnings) > _PARTS:
        out.print(f"and {len(warnings) - _PARTS} more; --json prints all", highlight=False)


def show_changes(starts: Sequence[Mapping[str, Any]], out: Console) -> None:
    """Print the options that changed when the run was resumed, as `configuration.changes` returns them."""
    for start in starts:
        if not start["changes"]:
            continue
        out.print(f"\nconfiguration, since step {start['step']}:", highlight=False)
        for change in start["changes"][:_PARTS]:
            values = ("unset" if value is None else shorten(value) for value in (change["before"], change["after"]))
            out.print(f"- {escape(change['option'])}: {escape(' -> '.join(values))}", highlight=False)
        if len(start["changes"]) > _PARTS:
            out.print(f"and {len(start['changes']) - _PARTS} more; --json prints all", highlight=False)


def outcomes_of(report: Report) -> str:
    """Return the counts of outcomes, such as ``1 failed, 5 scored``."""
    return ", ".join(f"{report.outcomes[name]} {name}" for name in sorted(report.outcomes)) or "none"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _spread(values: Mapping[str, Any]) -> str:
    if not values["count"]:
        return "none"
    names = ("mean", "std", "min", "p50", "p95", "max")
    return ", ".join(f"{name} {rounded(values[name])}" for name in names) + f", of {values['count']}"


def _show_causes(report: Report, out: Console) -> None:
    if not (causes := report.causes):
        return
    out.print(f"\n{report.outcomes['failed']} failed, of {counted(len(causes), 'cause')}:", highlight=False)
    for count, example in causes.most_common(SHOWN):
        out.print(f"- {counted(count, 'time')}, first: {escape(example)}", highlight=False)
    if len(causes) > SHOWN:
        out.print(f"- and {counted(len(causes) - SHOWN, 'other cause')}", highlight=False)


def _show_spreads(title: str, spreads: Mapping[str, Mapping[str, Any]], out: Console) -> None:
    if not spreads:
        return
    out.print()
    table = _table(title, "count", "mean", "std", "min", "p50", "p95", "max")
    for name, values in spreads.items():
        numbers = (_number(values[key]) for key in ("count", "mean", "std", "min", "p50", "p95", "max"))
        table.add_row(escape(cut(name, _NAME)), *numbers)
    out.print(table, highlight=False)


def _show_judges(judges: Judges, prices: Prices, out: Console) -> None:
    if not judges:
        return
    out.print()
    cost = ("cost",) if prices else ()
    table = _table("judge", "requests", "errors", "no\nverdict", "p50 s", "p95 s", "max s", "tokens", *cost)
    for name, judge in judges:
        seconds = judge.seconds.to_dict()
        tokens = judge.prompt_tokens + judge.completion_tokens
        counts = (str(value) for value in (judge.requests, judge.errors, judge.no_verdict))
        times = (_number(seconds[key]) for key in ("p50", "p95", "max"))
        costs = (_number(judge.cost(name, prices)),) if prices else ()
        table.add_row(escape(cut(name, _NAME)), *counts, *times, f"{tokens:,}", *costs)
    out.print(table, highlight=False)


def _show_parts(report: Report, out: Console) -> None:
    out.print()
    table = _table(str(report.group_by), "samples", "scored", "unscored", "failed", "mean score", "std")
    parts = report.to_dict()["parts"]
    for part in parts[:_PARTS]:
        outcomes = part["outcomes"]
        counts = (str(outcomes.get(name, 0)) for name in ("scored", "unscored", "failed"))
        spread = (_number(part["score"][key]) for key in ("mean", "std"))
        table.add_row(escape(cut(str(part["value"]), _NAME)), str(part["samples"]), *counts, *spread)
    out.print(table, highlight=False)
    if len(parts) > _PARTS:
        out.print(f"and {len(parts) - _PARTS} more; --json prints all", highlight=False)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(escape(first), overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else rounded(value) if isinstance(value, float) else str(value)
