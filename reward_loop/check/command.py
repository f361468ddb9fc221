"""``reward-loop check``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._json import encode
from reward_loop._options import (
    DataSource,
    FieldPaths,
    Manager,
    MoreOptions,
    RewardKwargs,
    RouterAddress,
    Timeout,
    json_or_text,
    nested,
    pairs,
)
from reward_loop._text import shorten
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.offline import Fields, read_rows

if TYPE_CHECKING:
    from reward_loop.check.trial import Report

__all__ = ["command"]

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}


def command(
    fn: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION", help="[cyan]file.py:name[/] or [cyan]package.module:name[/].", show_default=False
        ),
    ],
    data: Annotated[Path, typer.Option(help="Some rollouts: JSONL, or parquet by its suffix.", show_default=False)],
    rows: Annotated[int, typer.Option(min=1, help="How many of them, from the first.")] = 8,
    field: FieldPaths = None,
    data_source: DataSource = None,
    reward_kwarg: RewardKwargs = None,
    manager: Manager = "naive",
    router_address: RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many calls are tried at a time.")] = 16,
    timeout: Timeout = 300,
    option: MoreOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Try a reward function before a run.

    It is called on a few rows as the trainer would call it, then once more, many times at a time, and on an empty, a
    huge and a malformed response. The report says what would go wrong in a run, and what to change: rows that fail;
    calls that disturb each other in threads or on the event loop; an async function that blocks the loop; arguments
    that are changed; results that differ from call to call; what cannot be pickled.

    [bold]Example[/]

      reward-loop check reward.py:compute_score --data rollouts.jsonl -f solution_str=output -f ground_truth=gts

    The function is really called, some 40 times with 8 rows: a judge that costs money is paid. Exit codes: 0 nothing
    to change, 1 a problem was found, or the function cannot be called at all, 2 wrong usage.
    """
    # Here, so that the other commands start without them.
    from reward_loop import managers
    from reward_loop.check.trial import check
    from reward_loop.config import RewardLoopConfig, parse
    from reward_loop.scoring import load_function

    out, err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    reward_kwargs = {key: json_or_text(value) for key, value in pairs(reward_kwarg, "--reward-kwarg").items()}
    try:
        given = {"timeout": timeout or None, **nested(pairs(option, "--option"), "--option")}
        options = parse(RewardLoopConfig, given, "options")
        loaded = load_function(fn)
        function = managers.scoring_function(managers.get(manager), loaded, options, reward_kwargs=reward_kwargs)
        if not data.is_file():
            raise ConfigError(f"no such file: {data}")
        fields = Fields(pairs(field, "--field"), data_source=data_source, requires=function.requires)
        samples = [fields.to_sample(row) for row in islice(read_rows(data), rows)]
        with err.status("loading") as status:
            report = asyncio.run(
                check(
                    loaded,
                    samples,
                    reward_kwargs=reward_kwargs,
                    manager=manager,
                    router_address=router_address,
                    options=options,
                    concurrency=concurrency,
                    on_step=lambda step: status.update(f"trying {step}"),
                )
            )
    except KeyboardInterrupt:
        err.print("\n[yellow]Interrupted.[/]")
        raise typer.Exit(130) from None
    except (RewardLoopError, OSError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if as_json:
        print(encode(asdict(report) | {"problems": len(report.problems)}).decode())
    else:
        _show(report, out)
    if report.problems:
        raise typer.Exit(1)


def _show(report: Report, out: Console) -> None:
    table = Table("sample", "outcome", box=None, pad_edge=False)
    table.add_column("score", justify="right")
    table.add_column("time", justify="right")
    table.add_column("beside it")
    for row in report.rows:
        components = ", ".join(f"{name}={shorten(value, 24)}" for name, value in row.components.items())
        score = "" if row.score is None else f"{row.score:.6g}"
        beside = row.error.splitlines()[0] if row.error else components
        table.add_row(row.uid, row.outcome, score, f"{row.seconds * 1000:.3g} ms", escape(_cut(beside, 70)))
    kind = f"sync, called in {'processes' if report.in_processes else 'threads'}"
    kind = "async, awaited on the event loop" if report.is_async else kind
    if report.of_lists:
        kind += f", with lists of {len(report.rows)} samples"
    out.print(f"{escape(report.function)}: {kind}\n", highlight=False)
    out.print(table, highlight=False)
    out.print()
    checks = Table.grid(padding=(0, 2))
    for finding in report.findings:
        style = _STYLES[finding.status]
        checks.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.text))
    out.print(checks, highlight=False)
    count = len(report.problems)
    out.print(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found", highlight=False)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
