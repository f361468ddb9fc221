"""The command ``reward-loop score``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reward_loop._util import cli_options
from reward_loop._util.console import console
from reward_loop._util.json import encode
from reward_loop._util.stdout import reserve_stdout
from reward_loop._util.text import duration, rounded
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.scorer import Scorer, functions_of, load_scorer
from reward_loop.offline.estimate import dry_run_options, estimate, show_estimate
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.progress import ScoringProgress, Usage, usage_of
from reward_loop.offline.rows import Fields, check_fields
from reward_loop.offline.run import Summary, partial_of, score_file
from reward_loop.records import records
from reward_loop.records.judges import Judges
from reward_loop.records.prices import Prices
from reward_loop.records.show import outcomes_of, show_report
from reward_loop.scoring.load import load_function, source_hash
from reward_loop.types import Policy

__all__ = ["score"]

_DECIDES = {"path", "name", "reward_kwargs", "weight", "gate", "on_failed", "on_unscored", "default_score"}
"""The options of a component that affect a score."""

_STDOUT = Path("-")

_err = console(stderr=True)


def score(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FUNCTION] FILE",
            help="The reward function, [cyan]file.py:name[/] or [cyan]package.module:name[/] (left out where each "
            "component of a composite has a path), and the rollouts: JSONL or a JSON array, also compressed (gzip, "
            "Zstandard), parquet by its suffix, a folder (records, or verl's rollout dumps), a pattern such as "
            "[cyan]'dumps/*.jsonl'[/], or - for stdin.",
            show_default=False,
        ),
    ],
    fn: cli_options.Function = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="JSONL, compressed if it ends in .gz or .zst, or parquet by its suffix; - is stdout (JSONL, when all "
            "rows are scored). Default: FILE with .scored before its suffix; for a folder, DIR.scored.jsonl; for "
            "stdin, stdout.",
        ),
    ] = None,
    field: cli_options.FieldPaths = None,
    data_source: cli_options.DataSource = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rows that are scored at a time.")] = 64,
    timeout: cli_options.Timeout = 300,
    isolation: cli_options.Isolation = "thread",
    max_processes: Annotated[
        int | None, typer.Option(min=1, help="With processes: how many at a time. Default: one for each core.")
    ] = None,
    max_memory_mb: Annotated[
        int | None, typer.Option(min=16, help="With processes: the megabytes that one may use. Default: any.")
    ] = None,
    on_failed: Annotated[
        Policy, typer.Option(help="For rows that fail: mask (no score), default (a score), raise (stop).")
    ] = "mask",
    on_unscored: Annotated[
        Policy, typer.Option(help="The same for rows for which the function returns None.")
    ] = "mask",
    default_score: Annotated[float, typer.Option(help="The score under the policy default.")] = 0.0,
    max_failed_share: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when more than this share of the latest rows failed; 1: never.")
    ] = 0.5,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Record every row with its exchanges with judges in this folder.", show_default=False),
    ] = None,
    option: cli_options.MoreOptions = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an interrupted run and an existing output.")
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Score the failed rows of an interrupted or a finished run again."),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any row failed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Send no request: print an estimate of requests, tokens and cost instead."),
    ] = False,
    price: cli_options.Price = None,
) -> None:
    """Score stored rollouts with a reward function.

    The function is called just as in training: by keyword, with those of
    data_source, solution_str, ground_truth, extra_info, reward_router_address
    and reward_model_tokenizer that its signature names.

    [bold]Example[/]

      reward-loop score reward.py:compute_score rollouts.jsonl -f solution_str=output -f ground_truth=gts

    The output holds every row of the input, in order, with [cyan]row[/],
    [cyan]score[/], [cyan]outcome[/] (scored, unscored or failed),
    [cyan]error[/] and [cyan]reward_extra_info[/]. Run the same command again to
    resume an interrupted run; add --retry-failed to score its failed rows
    again, or those of a finished run. What the function prints goes to stderr.

    With --dry-run, the function is called for at most 100 rows, chosen at
    random, and each of its requests fails instead of being sent. The estimate
    is what these requests contain: a token for 4 characters, and max_tokens for
    each reply. With --price, it includes the cost.

    Exit status: 0 rows were scored, 1 the run was stopped by an error, or no
    row was scored, 2 wrong usage, 130 Ctrl-C.
    """
    fn, files = cli_options.function_and_files(arguments, fn, "--fn")
    if not files:
        raise ConfigError(f"name the rollouts, too: reward-loop score {fn} FILE")
    paths = cli_options.pairs(field, "--field")
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    options = {
        "timeout": timeout or None,
        "max_threads": concurrency,
        "isolation": isolation,
        "max_processes": max_processes,
        "max_memory_mb": max_memory_mb,
        "on_failed": on_failed,
        "on_unscored": on_unscored,
        "default_score": default_score,
        "max_failed_share": max_failed_share,
        "log_dir": None if log_dir is None else str(log_dir),
        **cli_options.more_options(context, option),
    }
    config = parse(RewardLoopConfig, options, cli_options.option_names(context))
    if dry_run:
        config = dry_run_options(config)
    prices = Prices.parse(price or ())
    with Inputs.open(files) as source, reserve_stdout() as stdout:
        if log_dir is not None and log_dir.resolve() in [path.resolve() for path in source.paths]:
            raise ConfigError(f"--log-dir {log_dir} is the folder that is scored: name another one")
        scorer = load_scorer(fn, manager, config, reward_kwargs=reward_kwargs, router_address=router_address)
        if getattr(scorer.manager, "needs_group", False):
            raise ConfigError(
                f"--manager {manager} compares the responses to a prompt, and a file of rollouts has no groups: try "
                f"such a function with `reward-loop check --manager {manager}`"
            )
        mapping = Fields(paths, data_source=data_source, requires=scorer.requires)
        if dry_run:
            check_fields(source.rows(), source.name, mapping)
            found = estimate(source, scorer.manager, mapping, concurrency)
            if as_json:
                stdout.write(encode(found.to_dict(prices)).decode() + "\n")
            else:
                show_estimate(found, prices, console(stdout))
            return
        _note_unused(context, scorer)
        if scorer.has_post_process:
            _err.print("note: post_process_scores is not applied: a file of rollouts has no groups")
        judges = Judges()
        if isinstance(scorer.manager, RewardLoopManagerBase):
            scorer.manager.judge_counts = judges
        target = None if output == _STDOUT else output or source.default_output()
        destination: Path | IO[bytes] = target or stdout.buffer
        if as_json and target is None:
            raise ConfigError("--json: the rows go to stdout, too: name a file for them with --output")
        with ScoringProgress(source.count(), scorer.manager, _err) as progress:
            try:
                summary = score_file(
                    source,
                    destination,
                    scorer.manager,
                    fields=mapping,
                    identity=_identity(scorer, config, paths, data_source, fn, manager, reward_kwargs),
                    concurrency=concurrency,
                    restart=restart,
                    retry_failed=retry_failed,
                    on_row=progress.completed,
                )
            except (KeyboardInterrupt, RewardLoopError, OSError) as error:
                partial = partial_of(source, destination)
                if not isinstance(error, ConfigError) and partial.exists():
                    error.add_note(
                        f"Completed rows are in {partial}: rerun the command to resume. Add --retry-failed to also "
                        "score the failed rows again."
                    )
                raise
        if config.log_dir is not None:
            records(config.log_dir).flush()
        summary.report.judges = judges
        usage = usage_of(scorer.manager)
        if as_json:
            stdout.write(encode(_summary(summary, usage, target, config.log_dir, prices)).decode() + "\n")
        else:
            out = _err if target is None else console(stdout)
            _show(summary, usage, target, config.log_dir, prices, out)
    failed = summary.outcomes["failed"]
    if not summary.rows:
        _err.print(f"note: {escape(source.name)} has no rows")
    elif not summary.outcomes["scored"]:
        _err.print(f"[bold red]error:[/] no row was scored: {outcomes_of(summary.report)}")
    if failed and target is not None:
        _err.print("To score the failed rows again, run the same command with --retry-failed.")
    if (summary.rows and not summary.outcomes["scored"]) or (strict and failed):
        raise typer.Exit(1)


def _note_unused(context: typer.Context, scorer: Scorer) -> None:
    """Print a note if options of processes are given, and no function runs in a process."""
    names, why = ["max_memory_mb", "max_processes"], "add --isolation process"
    if context.params["isolation"] == "process":
        names, why = ["isolation", *names], "only sync functions do"
    given = [f"--{name.replace('_', '-')}" for name in names if cli_options.is_given(context, name)]
    if given and not any(getattr(function, "in_processes", False) for function in functions_of(scorer.manager)):
        _err.print(f"note: no effect: {', '.join(given)}. No function runs in a process: {why}")


def _identity(
    scorer: Scorer,
    config: RewardLoopConfig,
    paths: Mapping[str, str],
    data_source: str | None,
    spec: str | None,
    manager: str,
    reward_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the identity of the run: all options that affect scores.

    Options that affect only the speed are left out, so that they may change when a run is resumed.
    """
    identity = {
        "function": {
            "name": spec,
            "sha256": source_hash(scorer.loaded),
            "arguments": reward_kwargs,
            "manager": manager,
        },
        "field mapping": {**paths, "data_source constant": data_source},
        "policy": [config.on_failed, config.on_unscored, config.default_score],
    }
    if config.components:
        identity["set of components"] = {
            name: {
                **component.model_dump(mode="json", include=_DECIDES),
                "sha256": component.path and source_hash(load_function(component.path, component.name)),
            }
            for name, component in config.components.items()
        }
    return identity


def _summary(
    summary: Summary, usage: Usage, output: Path | None, log_dir: str | None, prices: Prices
) -> dict[str, Any]:
    """Return the summary for ``--json``."""
    return {
        **summary.report.to_dict(prices),
        "rows": summary.rows,
        "resumed": summary.resumed,
        "mean_score": summary.mean,
        "seconds": summary.seconds,
        "rows_per_second": summary.rows_per_second,
        "tokens": usage.tokens,
        "cost": usage.cost,
        "output": None if output is None else str(output),
        "log_dir": log_dir,
    }


def _show(
    summary: Summary, usage: Usage, output: Path | None, log_dir: str | None, prices: Prices, out: Console
) -> None:
    show_report(summary.report, out, prices)
    out.print()
    table = Table.grid(padding=(0, 2))
    resumed = f", {summary.resumed} of them by an earlier run" if summary.resumed else ""
    table.add_row("rows", f"{summary.rows}{resumed}")
    table.add_row("throughput", f"{rounded(summary.rows_per_second)} rows/s, {duration(summary.seconds)} in all")
    if summary.resumed and summary.report.judges:
        table.add_row("judges", "only the requests of this run")
    if str(usage):
        table.add_row("used", f"{usage}, by this run")
    table.add_row("output", "stdout" if output is None else escape(str(output)))
    if log_dir is not None:
        table.add_row("records", f"{escape(str(log_dir))}; summary: reward-loop report {escape(str(log_dir))}")
    out.print(table)
