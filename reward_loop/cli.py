"""The command ``reward-loop``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from reward_loop import __version__
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
from reward_loop.check.command import command as check
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.offline import Fields, Summary, count_rows, score_file
from reward_loop.router.command import route
from reward_loop.watch.command import stuck
from reward_loop.watch.limits import limits

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)

_out = Console(soft_wrap=True)
_err = Console(stderr=True, soft_wrap=True)


def main() -> None:
    """Run the command."""
    app()


def _version(asked: bool) -> None:
    if asked:
        _out.print(f"reward-loop {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Rewards that never block RL training of language models."""


app.command()(route)
app.command("check")(check)
app.command()(stuck)
app.command()(limits)


@app.command()
def score(
    file: Annotated[Path, typer.Argument(help="Rollouts: JSONL, or parquet by its suffix.", show_default=False)],
    fn: Annotated[
        str,
        typer.Option(
            help="The reward function: [cyan]file.py:name[/] or [cyan]package.module:name[/].", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="JSONL, or parquet by its suffix. Default: FILE with .scored before its suffix."
        ),
    ] = None,
    field: FieldPaths = None,
    data_source: DataSource = None,
    reward_kwarg: RewardKwargs = None,
    manager: Manager = "naive",
    router_address: RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many rows are in work at a time.")] = 64,
    timeout: Timeout = 300,
    isolation: Annotated[
        str, typer.Option(help="Where a sync function runs: thread, or process, which can be killed and crash alone.")
    ] = "thread",
    max_processes: Annotated[
        int | None, typer.Option(min=1, help="With processes: how many at a time. Default: one for each core.")
    ] = None,
    max_memory_mb: Annotated[
        int | None, typer.Option(min=16, help="With processes: the megabytes that one may use. Default: any.")
    ] = None,
    on_failed: Annotated[
        str, typer.Option(help="For rows that fail: mask (no score), default (a score), raise (stop).")
    ] = "mask",
    on_unscored: Annotated[str, typer.Option(help="The same for rows for which the function returns None.")] = "mask",
    default_score: Annotated[float, typer.Option(help="The score under the policy default.")] = 0.0,
    max_failed_share: Annotated[
        float, typer.Option(help="Stop when more than this share of the latest rows failed; 1: never.")
    ] = 0.5,
    option: MoreOptions = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an interrupted run and an existing output.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="When going on, score rows that failed once more.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any row failed.")] = False,
) -> None:
    """Score stored rollouts with a reward function.

    The function is called just as in training: by keyword, with those of data_source, solution_str, ground_truth,
    extra_info, reward_router_address and reward_model_tokenizer that its signature names.

    [bold]Example[/]

      reward-loop score rollouts.jsonl --fn reward.py:compute_score -f solution_str=output -f ground_truth=gts

    The output holds every row of the input, in order, with [cyan]row[/], [cyan]score[/], [cyan]outcome[/] (scored,
    unscored or failed), [cyan]error[/] and [cyan]reward_extra_info[/]. A run that is interrupted goes on where it
    stopped when the same command is run again. Exit codes: 0 done, 1 stopped by an error, 2 wrong usage, 130 Ctrl-C.
    """
    target = output or file.with_name(f"{file.stem}.scored{file.suffix}")
    partial = target.with_name(target.name + ".partial")
    try:
        summary = _score(
            file,
            target,
            spec=fn,
            paths=pairs(field, "--field"),
            data_source=data_source,
            reward_kwargs={key: json_or_text(value) for key, value in pairs(reward_kwarg, "--reward-kwarg").items()},
            manager_name=manager,
            router_address=router_address,
            concurrency=concurrency,
            restart=restart,
            retry_failed=retry_failed,
            options={
                "timeout": timeout or None,
                "max_threads": concurrency,
                "isolation": isolation,
                "max_processes": max_processes,
                "max_memory_mb": max_memory_mb,
                "on_failed": on_failed,
                "on_unscored": on_unscored,
                "default_score": default_score,
                "max_failed_share": max_failed_share,
                **nested(pairs(option, "--option"), "--option"),
            },
        )
    except KeyboardInterrupt:
        _err.print(f"\n[yellow]Interrupted.[/] {_how_to_go_on(partial)}")
        raise typer.Exit(130) from None
    except (RewardLoopError, OSError) as error:
        _err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        if not isinstance(error, ConfigError) and partial.exists():
            _err.print(_how_to_go_on(partial))
        raise typer.Exit(1) from None
    _show(summary, target)
    if strict and summary.outcomes["failed"]:
        raise typer.Exit(1)


@app.command()
def simulate(
    batch: Annotated[int, typer.Option(min=1, help="Prompts a step.")] = 1024,
    responses: Annotated[int, typer.Option(min=1, help="Responses a prompt.")] = 5,
    judge: Annotated[
        str,
        typer.Option(
            metavar="DISTRIBUTION",
            help="Seconds a response: uniform:LOW:HIGH, constant:X, lognormal:MEDIAN:SIGMA, exponential:MEAN, or "
            "file:PATH (JSONL with measured latencies, such as the output of [cyan]reward-loop score[/]).",
        ),
    ] = "uniform:1:40",
    concurrency: Annotated[int, typer.Option(min=1, help="Responses that are judged at a time.")] = 256,
    generation: Annotated[float, typer.Option(min=0, help="Seconds of generation a step.")] = 103,
    training: Annotated[float, typer.Option(min=0, help="Seconds of updates a step.")] = 100,
    prepare: Annotated[
        float, typer.Option(min=0, help="Seconds a step of old and reference log-probabilities, beside training.")
    ] = 0,
    mini_batches: Annotated[int, typer.Option(min=1, help="Updates a step.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the simulated run.")] = 100,
    mode: Annotated[str, typer.Option(help="baseline, mini-batch, off-policy, both, or all.")] = "all",
    arrival: Annotated[
        str, typer.Option(help="Samples reach the judge at the end of generation (end), or during it (during).")
    ] = "end",
    one_batch_at_a_time: Annotated[
        bool, typer.Option("--one-batch-at-a-time", help="Judge a batch only when the one before it is done.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the judging times.")] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw the first steps into this PNG (needs matplotlib).")
    ] = None,
) -> None:
    """Simulate training steps, and say what overlapping them with judging would bring.

    Prints for each mode a step's length, its floor, how long the trainer waits for rewards, and which share of judging
    was hidden behind generation and training.
    """
    from reward_loop.agent import simulation
    from reward_loop.agent.latency import parse_latency
    from reward_loop.agent.schedule import MODES

    try:
        if arrival not in ("end", "during"):
            raise ConfigError(f"--arrival: end or during, got {arrival!r}")
        load = simulation.Workload(
            batch=batch,
            responses=responses,
            judge=parse_latency(judge),
            concurrency=concurrency,
            generation=generation,
            training=training,
            prepare=prepare,
            mini_batches=mini_batches,
            steps=steps,
            seed=seed,
            arrival="end" if arrival == "end" else "during",
            one_batch_at_a_time=one_batch_at_a_time,
        )
        runs = [simulation.simulate(load, name) for name in (MODES if mode == "all" else [mode])]
        table = Table("mode", box=None, pad_edge=False)
        for column in ("s a step", "floor", "over floor", "waits for rewards", "judging hidden"):
            table.add_column(column, justify="right")
        for run in runs:
            table.add_row(
                run.mode,
                f"{run.step_seconds:.1f}",
                f"{run.floor:.1f}",
                f"{run.over_floor:.1%}",
                f"{run.waiting:.1f} s",
                f"{run.hidden:.0%}",
            )
        _out.print(table, highlight=False)
        judging = sum(runs[0].judge_seconds) / steps / concurrency
        _out.print(
            f"\nG + T = {load.gpu_seconds:.1f} s; R = {judging:.1f} s, {load.samples} responses of "
            f"{load.judge.mean:.3g} s with {concurrency} at a time.",
            highlight=False,
        )
        enough = simulation.enough_concurrency(load)
        if enough > concurrency:
            higher = ", ".join(
                f"{seconds:.1f} s with {value}" for value, seconds in simulation.with_concurrency(load, runs[-1].mode)
            )
            _out.print(
                f"Judging bounds the step. In mode {runs[-1].mode}: {higher}. From about {enough} at a time, judging "
                "takes no longer than generation and training.",
                highlight=False,
            )
        else:
            _out.print("Generation and training bound the step: more concurrency brings little.", highlight=False)
        if timeline is not None:
            simulation.draw_timeline(runs, timeline)
            _out.print(f"timeline: {escape(str(timeline))}", highlight=False)
    except (RewardLoopError, OSError) as error:
        _err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _score(
    file: Path,
    output: Path,
    *,
    spec: str,
    paths: dict[str, str],
    data_source: str | None,
    reward_kwargs: dict[str, Any],
    manager_name: str,
    router_address: str | None,
    concurrency: int,
    restart: bool,
    retry_failed: bool,
    options: dict[str, Any],
) -> Summary:
    # Here, so that the other commands start without them.
    from reward_loop import managers
    from reward_loop.config import RewardLoopConfig, parse
    from reward_loop.scoring import load_function
    from reward_loop.scoring.load import source_hash

    config = parse(RewardLoopConfig, options, "options")
    loaded = load_function(spec)
    manager_class = managers.get(manager_name)
    function = managers.scoring_function(manager_class, loaded, config, reward_kwargs=reward_kwargs)
    if getattr(function, "has_post_process", False):
        _err.print("note: post_process_scores is not applied: a file of rollouts has no groups")
    reward_manager = manager_class(
        config=config,
        tokenizer=None,
        compute_score=function,
        reward_router_address=router_address,
        reward_model_tokenizer=None,
    )
    requires = getattr(reward_manager, "requires", function.requires)
    # What changes a score is part of the run's identity; what only changes its pace may differ when it goes on.
    identity = {
        "function": {"name": spec, "sha256": source_hash(loaded), "arguments": reward_kwargs, "manager": manager_name},
        "field mapping": {**paths, "data_source constant": data_source},
        "policy": [config.on_failed, config.on_unscored, config.default_score],
    }
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    with Progress(
        TextColumn("scoring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_err,
        disable=not _err.is_terminal,
    ) as progress:
        task = progress.add_task("scoring", total=count_rows(file))
        return score_file(
            file,
            output,
            reward_manager,
            fields=Fields(paths, data_source=data_source, requires=requires),
            identity=identity,
            concurrency=concurrency,
            restart=restart,
            retry_failed=retry_failed,
            on_row=lambda done: progress.update(task, completed=done),
        )


def _show(summary: Summary, output: Path) -> None:
    table = Table.grid(padding=(0, 2))
    mean = "none" if summary.mean is None else f"{summary.mean:.6g} over {summary.scores} rows with a score"
    resumed = f", {summary.resumed} of them by an earlier run" if summary.resumed else ""
    table.add_row("rows", f"{summary.rows}{resumed}")
    table.add_row("mean score", mean)
    table.add_row("outcomes", ", ".join(f"{summary.outcomes[name]} {name}" for name in sorted(summary.outcomes)))
    table.add_row("throughput", f"{summary.rows_per_second:.4g} rows/s, {_duration(summary.seconds)} in all")
    table.add_row("slowest", ", ".join(f"{name} {_duration(seconds)}" for seconds, name in summary.slowest))
    table.add_row("output", escape(str(output)))
    _out.print(table, highlight=False)
    if summary.errors:
        _out.print(f"\n{summary.outcomes['failed']} failed; the first:", highlight=False)
        for error in summary.errors:
            _out.print(f"- {escape(error)}", highlight=False)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _how_to_go_on(partial: Path) -> str:
    return f"Rows that are done are kept in {escape(str(partial))}: run the same command again to go on."
