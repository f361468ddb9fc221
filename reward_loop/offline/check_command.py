"""The command ``reward-loop check``."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from reward_loop._util.json import encode
from reward_loop._util.signals import run
from reward_loop._util.standard_streams import console, reserve_stdout
from reward_loop._util.text import cut, duration, shorten
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.managers.scorer import load_scorer
from reward_loop.offline import check as dry_run
from reward_loop.offline import cli_options
from reward_loop.offline.attacks import WRONG
from reward_loop.offline.check import CheckReport
from reward_loop.offline.fields import Fields
from reward_loop.offline.inputs import Inputs
from reward_loop.scoring import load_function

_ATTACKED_ROWS = 50
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "skipped": "dim"}


def check(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FUNCTION] FILE",
            help="The reward function, [cyan]file.py:name[/] or [cyan]package.module:name[/], and "
            " the rollouts, in any format of [cyan]reward-loop score[/].",
            show_default=False,
        ),
    ],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to use, from the first.")] = 8,
    field: cli_options.FieldPaths = None,
    data_source: cli_options.DataSource = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    isolation: cli_options.Isolation = "thread",
    option: cli_options.MoreOptions = None,
    fail_on: Annotated[
        Literal["problem", "false-positive"],
        typer.Option(help="What sets the exit status to 1: a problem, or also each wrong answer that is accepted."),
    ] = "problem",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a reward function before a run.

    Calls the function on a few rows as the trainer would call it, then again,
    with concurrent calls, with an empty, a huge and a malformed response, and
    with its requests refused. A function that scores by a rule is attacked:
    answers that are right or wrong are made from up to 50 rows, and the report
    lists wrong ones that are accepted, right ones that are refused, and crashes.

    [bold]Example[/]

      reward-loop check reward.py:compute_score rollouts.jsonl -f solution_str=output -f ground_truth=gts

    With 8 rows, the function is called about 36 times, and a rule up to 5,000
    times in processes; requests to a paid judge cost money. Its output goes to stderr.

    Exit status: 0 no problems, 1 a problem was found, or the function cannot be
    called with the arguments that a run passes, 2 wrong usage, 130 Ctrl-C.
    """
    fn, files = cli_options.function_and_files(arguments)
    if not files:
        raise ConfigError("name the rollouts, too: reward-loop check FUNCTION FILE")
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    given = {"isolation": isolation} | cli_options.more_options(context, option)
    options = parse(RewardLoopConfig, given, cli_options.option_names(context))
    paths = cli_options.pairs(field, "--field")
    err = console(stderr=True)
    with reserve_stdout() as stdout:
        if fn is not None:
            load_function(fn)  # an error here is wrong usage (status 2), one below a problem of the function (status 1)
        try:
            scorer = load_scorer(fn, manager, options, reward_kwargs=reward_kwargs, router_address=router_address)
        except FunctionLoadError as error:
            err.print(f"[bold red]problem:[/] {escape(str(error))}")
            raise typer.Exit(1) from None
        fields = Fields(paths, data_source=data_source, requires=scorer.requires)
        read = islice(Inputs.open(files).rows(), max(rows, _ATTACKED_ROWS))
        samples = [fields.to_sample(row) for row in read]
        spinner = Spinner("dots", "loading")

        # stdout is already redirected to stderr. Live must not redirect it again.
        with Live(spinner, console=err, transient=True, redirect_stdout=False):
            report = run(
                dry_run.check(
                    scorer.loaded,
                    samples[:rows],
                    reward_kwargs=reward_kwargs,
                    manager=manager,
                    router_address=router_address,
                    options=options,
                    more=[sample for sample in samples[rows:] if not sample.error],
                    on_step=lambda step: spinner.update(text=f"checking {step}"),
                ),
            )
        if as_json:
            stdout.write(encode(asdict(report) | {"problems": len(report.problems)}).decode() + "\n")
        else:
            _show(report, console(stdout))
    accepted = report.attack.flagged(WRONG) if report.attack is not None and fail_on == "false-positive" else []
    if report.problems or accepted:
        raise typer.Exit(1)


def _show(report: CheckReport, out: Console) -> None:
    table = Table("sample", "outcome", box=None, pad_edge=False)
    table.add_column("score", justify="right")
    table.add_column("time", justify="right")
    table.add_column("other values")
    for row in report.rows:
        components = ", ".join(f"{name}={shorten(value, 24)}" for name, value in row.components.items())
        score = "" if row.score is None else f"{row.score:.6g}"
        others = row.error.splitlines()[0] if row.error else components
        table.add_row(row.uid, row.outcome, score, duration(row.seconds), escape(cut(others, 70)))
    kind = f"sync, called in {'processes' if report.in_processes else 'threads'}"
    kind = "async, awaited on the event loop" if report.is_async else kind
    kind += f", with lists of {len(report.rows)} samples" if report.is_batched else ""
    out.print(f"{escape(report.function)}: {kind}")
    out.print()
    out.print(table)
    out.print()
    checks = Table.grid(padding=(0, 2))
    for finding in report.findings:
        style = _STYLES[finding.status]
        checks.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.text))
    out.print(checks)
    count = len(report.problems)
    out.print(f"\n{count or 'no'} problem{'' if count == 1 else 's'} found")
