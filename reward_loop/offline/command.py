"""The command ``reward-loop score``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from reward_loop._util.json import encode
from reward_loop._util.standard_streams import console, reserve_stdout
from reward_loop._util.text import counted
from reward_loop.config import RecordConfig, RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import load_scorer
from reward_loop.offline import cli_options
from reward_loop.offline.fields import Fields, check_fields
from reward_loop.offline.folder import MAX_BYTES, ScoredFolder, check_export
from reward_loop.offline.folder import export as write_export
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.report_command import outcomes_of, show_report, summary_of
from reward_loop.offline.run import ScoringProgress, score_rows
from reward_loop.scoring.load import source_hash

_err = console(stderr=True)


def score(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[FUNCTION] FILE",
            help="The reward function, [cyan]file.py:name[/], [cyan]package.module:name[/] or a ready judge such as "
            "[cyan]judge:rubric[/], and the rollouts: JSONL, parquet by its suffix, or a folder (records, or verl's "
            "rollout dumps).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The folder of the records. Default: FILE with .scored in place of its suffix.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="When all rows are scored, write them with their scores, as JSONL.",
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
    option: cli_options.MoreOptions = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the records of an earlier run.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Score the failed rows of an earlier run again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score stored rollouts with a reward function.

    The function is called just as in training: by keyword, with those of
    data_source, solution_str, ground_truth, extra_info, reward_router_address
    and reward_model_tokenizer that its signature names.

    [bold]Example[/]

      reward-loop score reward.py:compute_score rollouts.jsonl -f solution_str=output -f ground_truth=gts

    Every row gets a record, as a sample of a training run: read them with
    [cyan]reward-loop report[/] and [cyan]view[/]. Run the same command again to resume
    an interrupted run: only rows without a record, or left out by the budget, are
    scored. What the function prints goes to stderr. To try a function that costs
    money, score a few rows: head -n 20 rollouts.jsonl > few.jsonl.

    -O sets the other options of the reward loop, such as -O on_failed=raise,
    -O max_failed_share=0.1, or, with --isolation process, -O max_processes=4.

    Exit status: 0 rows were scored, 1 the run was stopped by an error, or no
    row was scored, 2 wrong usage, 130 Ctrl-C.
    """
    fn, files = cli_options.function_and_files(arguments)
    if not files:
        raise ConfigError(f"name the rollouts, too: reward-loop score {fn} FILE")
    paths = cli_options.pairs(field, "--field")
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    options = {
        "timeout": timeout or None,
        "max_threads": concurrency,
        "isolation": isolation,
        **cli_options.more_options(context, option),
    }
    config = parse(RewardLoopConfig, options, cli_options.option_names(context))
    if config.log_dir is not None:
        raise ConfigError("-O log_dir has no effect: the records are in the folder --output")
    source = Inputs.open(files)
    path = output or _default_output(source)
    # Absolute: the function may change the working directory.
    config = config.model_copy(update={"log_dir": str(path.absolute()), "record": _keeping_all(config.record)})
    for one in source.paths:
        if one.is_dir() and path.resolve().is_relative_to(one.resolve()):
            raise ConfigError(f"--output {path} is in the folder that is scored: choose another one")
    if export is not None:
        check_export(source, export)
    with reserve_stdout() as stdout:
        scorer = load_scorer(fn, manager, config, reward_kwargs=reward_kwargs, router_address=router_address)
        fields = Fields(paths, data_source=data_source, requires=scorer.requires)
        check_fields(source.rows(), source.name, fields)
        # All that decides about the scores. What affects only the speed may change when a run is resumed.
        identity = {
            "input": source.identity(),
            "function": [fn, source_hash(scorer.loaded), reward_kwargs, manager],
            "field mapping": [paths, data_source],
            "policy": [config.on_failed, config.on_unscored, config.default_score],
        }
        progress = ScoringProgress(source.count(), _err)
        with ScoredFolder.open(path, identity, restart=restart) as folder:
            folder.forget_unfinished(failed=retry_failed)
            try:
                resumed = score_rows(
                    source, folder, scorer.manager, fields=fields, concurrency=concurrency, on_row=progress.completed
                )
            except (KeyboardInterrupt, RewardLoopError, OSError) as error:
                if not isinstance(error, ConfigError):
                    error.add_note(
                        f"The records of the completed rows are in {path}: rerun the command to resume. Add "
                        "--retry-failed to also score the failed rows again."
                    )
                raise
            # Within the block, in which the folder is locked: another run could change the records.
            report = summary_of(path)
            if export is not None:
                write_export(source, folder, export)
        run = {"rows": report["samples"], "resumed": resumed, "records": str(path), "export": export and str(export)}
        if as_json:
            stdout.write(encode({**report, **run}).decode() + "\n")
        else:
            out = console(stdout)
            show_report(report, out)
            earlier = f", {resumed} of them by an earlier run" if resumed else ""
            out.print(f"\nrows: {report['samples']}{earlier}")
            out.print(f"records: {escape(str(path))}; in the browser: reward-loop view {escape(str(path))}")
    failed = report["outcomes"]["failed"]
    if not report["samples"]:
        _err.print(f"note: {escape(source.name)} has no rows")
    elif not report["outcomes"]["scored"]:
        _err.print(f"[bold red]error:[/] no row was scored: {outcomes_of(report)}")
    if failed:
        _err.print("To score the failed rows again, run the same command with --retry-failed.")
    if report["over_budget"]:
        _err.print(
            f"The budget left {counted(report['over_budget'], 'row')} without a score. To score them, rerun the "
            "command: each run has the whole budget of -O budget.max_cost and -O budget.max_tokens."
        )
    if report["samples"] and not report["outcomes"]["scored"]:
        raise typer.Exit(1)


def _keeping_all(record: RecordConfig) -> RecordConfig:
    """Return the options of records without the default of the largest size: no text is deleted."""
    return record if "max_bytes" in record.model_fields_set else record.model_copy(update={"max_bytes": MAX_BYTES})


def _default_output(source: Inputs) -> Path:
    """Return the folder of the records, beside the only input.

    Raises:
        ConfigError: there are several inputs.
    """
    if len(source.paths) > 1:
        raise ConfigError(f"{len(source.paths)} inputs are scored: name the folder of the records by --output DIR")
    path = source.paths[0].resolve()
    if path.is_dir():
        return path.parent / f"{path.name}.scored"
    return source.paths[0].with_suffix(".scored")
