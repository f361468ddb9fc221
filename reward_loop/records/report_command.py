"""The command ``reward-loop report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reward_loop._util import cli_options
from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console
from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError
from reward_loop.records.health import health
from reward_loop.records.prices import Price
from reward_loop.records.reader import RecordsReader
from reward_loop.records.report import Report
from reward_loop.records.show import counted, show_report, show_warnings

__all__ = ["report"]


def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder of records, such as checkpoints/.../rewards.", show_default=False),
    ],
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
    the warnings of the health monitors.
    docs/reports.md describes the summary.
    """
    out = console()
    prices = Price.parse(price)
    reader, found, fields = RecordsReader(folder), Report(group_by), set[str]()
    for row in reader.rows():
        found.add(row)
        if group_by is not None and not found.parts:
            fields |= row.keys() | {f"components.{name}" for name in row.get("components") or ()}
    if group_by is not None and found.samples and not found.parts:
        raise ConfigError(
            f"--group-by: no row has a field {group_by!r}{did_you_mean(group_by, fields) or '.'} Known: "
            f"{listing(fields)}"
        )
    warnings = health(folder)
    if as_json:
        print(encode({**found.to_dict(prices), "warnings": warnings}).decode())
    else:
        show_report(found, out, prices)
        show_warnings(warnings, out)
    if reader.incomplete:
        console(stderr=True).print(
            f"note: {counted(reader.incomplete, 'incomplete line')} left out: of processes that were killed, or that "
            "are writing"
        )
