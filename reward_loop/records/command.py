"""The command ``reward-loop stuck``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console
from reward_loop.records.watchdog import ask, processes, why

__all__ = ["stuck"]


def stuck(
    pid: Annotated[
        list[int] | None,
        typer.Argument(metavar="PID", help="Processes to ask; by default all processes of this user on this machine."),
    ] = None,
    threads: Annotated[bool, typer.Option("--threads", help="Also show where the threads of a process are.")] = False,
    timeout: Annotated[float, typer.Option(min=0, max=86400, help="Seconds to wait for the answer of a process.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Ask running jobs which samples have been running longest.

    Every process that scores samples answers, such as the reward workers of a
    verl run on this machine, also while its event loop is blocked. It shows the
    number of running samples, and of the oldest ones the name, function, time,
    and what they wait for: requests by reward_loop.client, limits, a free
    thread or process, the other samples of a batch or group, and the pause
    before the next attempt. Run it on each node of a job.

    Exit status: 0 all processes answered, 1 one did not, or there is none.
    """
    out, err = console(), console(stderr=True)
    answers, silent = [], 0
    for process in pid or processes():
        try:
            answers.append(ask(process, timeout))
        except (OSError, ValueError) as error:
            silent += 1
            err.print(f"[bold red]process {process}:[/] {escape(why(error))}")
    if as_json:
        print(encode(answers).decode())
    else:
        for answer in answers:
            _show(answer, out, threads)
    if not answers and not silent:
        err.print("no process of this user on this machine scores samples")
    if silent or not answers:
        raise typer.Exit(1)


def _show(answer: dict[str, Any], out: Console, threads: bool) -> None:
    out.print(f"[bold]process {answer['pid']}[/]: {escape(answer['command'])}")
    out.print(f"{answer['running']} samples are running")
    if answer["oldest"]:
        table = Table(box=None, pad_edge=False)
        table.add_column("seconds", justify="right")
        for column in ("sample", "data source", "function", "waits for"):
            table.add_column(column, overflow="fold")
        for call in answer["oldest"]:
            table.add_row(
                f"{call['seconds']:.1f}",
                escape(call["uid"] or ""),
                escape(call["data_source"]),
                escape(call["function"]),
                escape(", ".join(call["asking"])),
            )
        out.print(table)
    if threads:
        for name, lines in answer["threads"].items():
            out.print(f"{escape(name)}:\n  " + escape("\n  ".join(lines)))
    out.print()
