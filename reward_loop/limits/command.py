"""The command ``reward-loop limits``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util.cli_options import json_or_text, pairs
from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console
from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.limits.permit import OF_MODEL
from reward_loop.records.watchdog import ask, processes, why


def limits(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Name of a limit; by default all limits are shown.", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTION=VALUE",
            help="Options to change, such as [cyan]max_concurrent=64[/]; [cyan]null[/] removes a bound.",
            show_default=False,
        ),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option(help="Process to query; by default all processes of this user on this machine. Repeatable."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=86400, help="Seconds to wait for the response of a process.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the limits as JSON.")] = False,
) -> None:
    """Show the limits of running jobs, or change one.

    Queries the processes that score samples, as [cyan]reward-loop stuck[/]
    does. A change applies to all workers of the job, on all nodes, until the
    job ends. The configuration is not changed, so a resumed run has its old
    limits.

    [bold]Examples[/]

      reward-loop limits

      reward-loop limits judge max_concurrent=64 requests_per_minute=600

    The options are those of reward_loop.limits.NAME: max_concurrent,
    requests_per_minute, tokens_per_minute, burst_seconds,
    estimated_tokens_per_request, adaptive, max_wait.

    Exit status: 0 done, 1 no process responds, 2 wrong usage, or the change
    is rejected.
    """
    out, err = console(), console(stderr=True)
    if name is not None and "=" in name:
        raise typer.BadParameter(f"name the limit first: reward-loop limits NAME {name}", param_hint="NAME")
    wanted = {option: json_or_text(value) for option, value in pairs(changes, "OPTION=VALUE").items()}
    jobs: dict[str, _ReportedJob] = {}
    for process in pid or processes():
        try:
            for state in ask(process, timeout, "limits"):
                jobs.setdefault(state["job"], _ReportedJob(state["job"])).add(process, state)
        except (OSError, ValueError) as error:
            err.print(f"[bold red]process {process}:[/] {escape(why(error))}")
    if not jobs:
        raise RewardLoopError("none of the queried processes scores samples")
    matching = [job for job in jobs.values() if name is None or name in job.limits]
    if not matching:
        known = {limit for job in jobs.values() for limit in job.limits}
        assert name is not None
        raise ConfigError(f"unknown limit {name!r}{did_you_mean(name, known) or '.'} Configured: {listing(known)}")
    if wanted:
        assert name is not None
        if len(matching) > 1:
            described = "; ".join(f"{job.name} (--pid {job.pids[0]})" for job in matching)
            raise ConfigError(f"several jobs have this limit; choose one with --pid: {described}")
        _announce(matching[0], name, wanted, err)
        _change(matching[0], name, wanted, timeout)
    if as_json:
        print(encode([{"job": job.name, "processes": job.pids, "states": job.states} for job in matching]).decode())
        return
    for job in matching:
        _show(job, name, out)
    if wanted:
        options = " ".join(f"reward_loop.limits.{name}.{change}" for change in changes or ())
        if name is not None and name.startswith(OF_MODEL):
            options = f"the option max_concurrent of the model {name.removeprefix(OF_MODEL)}"
        out.print(f"The change applies until the job ends. To keep it for a new or resumed job: {escape(options)}")


class _ReportedJob:
    """A job, as reported by the processes that take part in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pids: list[int] = []
        self.states: list[dict[str, Any]] = []
        """The status of each set of limits: usually one; without a service, one per set in the process."""

    def add(self, pid: int, state: dict[str, Any]) -> None:
        """Add the status that a process reported. The first process without an error represents the job."""
        if not self.pids or pid == self.pids[0]:
            self.pids = [pid]
            self.states.append(state)
        elif self.states[0]["error"] is None:
            self.pids.append(pid)
        else:
            self.pids.insert(0, pid)
            self.states = [state]

    @property
    def limits(self) -> dict[str, dict[str, Any]]:
        """All limits of the job by name."""
        return {name: limit for state in self.states for name, limit in state.get("limits", {}).items()}


def _announce(job: _ReportedJob, name: str, changes: dict[str, Any], err: Console) -> None:
    """Print which job a change applies to, and the old and new value of each option, before it is made."""
    old = job.limits.get(name, {})
    values = ", ".join(f"{option} {_shown(old.get(option))} -> {_shown(value)}" for option, value in changes.items())
    pids = ", ".join(map(str, job.pids))
    err.print(
        f"Changing {escape(name)} of job {escape(job.name)} (process{'' if len(job.pids) == 1 else 'es'} {pids}): "
        f"{escape(values)}",
    )


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _change(job: _ReportedJob, name: str, changes: dict[str, Any], timeout: float) -> None:
    """Change a limit through a process of the job, and refresh the job's status.

    Raises:
        ConfigError: the change is rejected.
        RewardLoopError: no process of the job responds.
    """
    for pid in job.pids:
        try:
            ask(pid, timeout, "configure", job.name, name, changes)
            job.states = [state for state in ask(pid, timeout, "limits") if state["job"] == job.name]
        except OSError:
            continue
        return
    raise RewardLoopError(f"no process of the job {job.name} responds")


def _show(job: _ReportedJob, name: str | None, out: Console) -> None:
    pids = ", ".join(map(str, job.pids))
    out.print(f"[bold]job {escape(job.name)}[/], {'process' if len(job.pids) == 1 else 'processes'} {pids}")
    for state in job.states:
        if state["error"] is not None:
            out.print(f"[bold red]no response:[/] {escape(state['error'])}")
            continue
        limits = {key: limit for key, limit in state["limits"].items() if name in (None, key)}
        if limits:
            table = Table("limit", box=None, pad_edge=False)
            for column in ("in flight", "waiting", "requests a minute", "tokens a minute", "max_wait"):
                table.add_column(column, justify="right")
            for key, limit in limits.items():
                found = " (adaptive)" if limit["adaptive"] else ""
                table.add_row(
                    escape(key),
                    _of(limit["in_flight"], limit["max_in_flight"]) + found,
                    str(limit["waiting"]),
                    _of(limit["requests_last_minute"], limit["requests_per_minute"]),
                    _of(limit["tokens_last_minute"], limit["tokens_per_minute"]),
                    "unlimited" if limit["max_wait"] is None else f"{limit['max_wait']:g} s",
                )
            out.print(table)
        else:
            out.print("no limits")
        if state["cost"] or state["tokens"]:
            out.print(f"used in total: {state['tokens']:g} tokens, cost {state['cost']:g}")
        if state["spent"]:
            out.print(escape(state["spent"]))
    out.print()


def _of(used: float, limit: float | None) -> str:
    return f"{used:g}" if limit is None else f"{used:g} of {limit:g}"
