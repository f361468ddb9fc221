"""Scores the rows of a file, resumes that, and writes their scores: the command ``reward-loop score``.

Invariants:

- The input is read as needed: while rows are scored, only the rows in flight are in memory, and for parquet also the
  current record batch. If the manager needs groups, all rows are in memory: a group may be anywhere in the input.
- The results are the records of the rows. A row with a record is not scored again, unless it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from reward_loop._util.json import encode, to_json
from reward_loop._util.signals import run
from reward_loop._util.standard_streams import console, reserve_stdout
from reward_loop.config import RecordConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.failures import Failures, on_one_line
from reward_loop.managers.scorer import load_scorer, returns_results, scored
from reward_loop.offline import cli_options
from reward_loop.offline.inputs import Fields, Inputs, check_fields
from reward_loop.offline.report_command import outcomes_of, show_report, summary_of
from reward_loop.records import ActiveSample, NoRecordsError, Records, RecordsReader, parse_line, records
from reward_loop.scoring.load import source_hash
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

_err = console(stderr=True)

T = TypeVar("T")

LINE_S = 10.0
"""The least number of seconds between two lines about the progress."""

MAX_CAUSES = 20
"""The largest number of causes of missing scores that are printed while rows are scored."""


def score_rows(
    source: Inputs,
    folder: ScoredFolder,
    manager: Any,
    *,
    fields: Fields,
    concurrency: int = 64,
    on_row: Callable[[int, RewardResult | None], None] = lambda done, result: None,
) -> int:
    """Score the rows of the inputs that have no record in the folder; runs its own event loop.

    Args:
        source: the inputs.
        folder: the folder to which the manager writes its records.
        manager: a reward manager; its ``run_single`` receives a `RewardSample` for each row. If it needs groups, all
            rows of a group are scored at the same time; a group that lacks records is scored as a whole.
        fields: the field mapping.
        concurrency: maximum number of rows in flight; at least one group.
        on_row: called with the number of rows that have a result, and the latest result: after each row, and at the
            start, without a result.

    Returns:
        the number of rows that had a record before.

    Raises:
        RewardLoopError: a policy or the bound on failures stopped the run.
        OSError: a record could not be written.
    """
    recorded = {row["uid"] for row in folder.rows()}
    at_once = concurrency
    if getattr(manager, "needs_group", False):
        groups = _groups(source, fields)
        incomplete = {name for group in groups if not group.keys() <= recorded for name in group.keys() & recorded}
        folder.forget(incomplete)
        recorded -= incomplete
        units = (list(group.values()) for group in groups if not group.keys() <= recorded)
        at_once = max(1, concurrency // max(map(len, groups), default=1))
    else:
        units = ([fields.to_sample(row)] for row in source.rows() if row.name not in recorded)
    done = resumed = len(recorded)
    on_row(done, None)
    is_recording = returns_results(manager) and type(manager).score is RewardLoopManagerBase.score
    if isinstance(manager, RewardLoopManagerBase) and not is_recording:
        manager.records = None  # the only record of a sample is that of `_recorded`
    call = scored if is_recording else functools.partial(_recorded, folder.writer)

    async def score(sample: RewardSample) -> None:
        nonlocal done
        result, _ = await call(manager, sample, sample.uid)
        # The records are the only result: without them, further calls would be in vain.
        folder.check_written()
        done += 1
        on_row(done, result)

    async def score_together(samples: list[RewardSample]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(score(sample))

    with contextlib.chdir("."):  # a function in a thread may change the working directory
        run(for_each(units, at_once, score_together))
    folder.flush()
    return resumed


def _groups(source: Inputs, fields: Fields) -> list[dict[str, RewardSample]]:
    """Return the samples of all rows by group, each with the number of samples in its group.

    A row that cannot be scored is a group of its own.

    Raises:
        ConfigError: a row has no group.
    """
    groups: dict[tuple[bool, str], dict[str, RewardSample]] = {}
    for row in source.rows():
        sample = fields.to_sample(row)
        if sample.error is not None:
            groups[True, row.name] = {row.name: replace(sample, group=row.name)}
        elif sample.group is None:
            raise ConfigError(
                f"{row.name} has no field `group` or `uid`, and the manager needs the group of each row: name the "
                "right field by --field group=..."
            )
        else:
            groups.setdefault((False, sample.group), {})[row.name] = sample
    return [
        {name: replace(sample, group_size=len(group)) for name, sample in group.items()} for group in groups.values()
    ]


async def for_each(items: Iterable[T], concurrency: int, call: Callable[[T], Awaitable[None]]) -> None:
    """Call ``call`` with each item, at most ``concurrency`` at a time. Only the items in flight are in memory.

    Raises:
        RewardLoopError | OSError: the first of these errors that ``call`` raised; it has cancelled the others.
    """
    left = iter(items)

    async def worker() -> None:
        for item in left:  # the workers share one iterator
            await call(item)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(worker())
    except* (RewardLoopError, OSError) as group:
        # Raised below, not here: within `except*`, it would become part of a group again.
        stopped: BaseException = group
        while isinstance(stopped, BaseExceptionGroup):
            stopped = stopped.exceptions[0]
    else:
        return
    raise stopped


async def _recorded(writer: Records, manager: Any, sample: RewardSample, name: object) -> tuple[RewardResult, Reward]:
    """Score a sample with a manager that records none, or changes rewards after that, and record it."""
    with ActiveSample(sample, type(manager).__name__) as active:
        result, reward = await scored(manager, sample, name)
        writer.write_sample(active, replace(result, total_s=active.seconds))
    return result, reward


class ScoringProgress:
    """Prints now and then how many rows are complete, and the failures of this run."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._failures = Failures()
        self._causes = self._failed = 0

    def completed(self, rows: int, result: RewardResult | None) -> None:
        """Count a result; ``rows`` are complete, earlier runs included. ``result`` is the latest one of this run."""
        if result is not None:
            self._failed += result.outcome is Outcome.FAILED
            # The first error of each cause; the summary at the end has the numbers.
            if self._failures.add(result) and self._causes < MAX_CAUSES:
                self._causes += 1
                what = f"{result.outcome} (further rows with this cause are only counted)"
                self._console.print(f"{what}: {escape(on_one_line(result.error or result.cause or ''))}")
        if self._clock() >= self._last_line + LINE_S:
            self._last_line = self._clock()
            self._console.print(f"scoring: {rows:,} rows, {self._failed:,} failed")


# ---- the folder ----

_FLUSH_S = 600.0
"""Seconds within which all records must be on the disk at the end."""

RUN = "run.json"
"""The file with the digests of what decides about the scores."""

MAX_BYTES = 2**62
"""The largest size of the folder: nothing is deleted."""

COLUMNS = ("score", "outcome", "error", "components")
"""The fields that are added: the score after the policy, and what the record of the row contains. An input field of
the same name is renamed to ``input_<name>``."""


class ScoredFolder:
    """A folder of records with one record for each row that has been scored. A row's name is the record's ``uid``.

    Invariants:

    - Only one process writes the folder: it locks it.
    - All records are of one run: the file `RUN` identifies its input, function and options.
    - A record that cannot be written is an error. One that a killed process could not complete is left out by readers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = records(path, MAX_BYTES)
        """This process's writer of records. Its path is absolute: a function may change the working directory."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Iterator[Self]:
        """Yield the folder of a run, new or resumed; it is locked within ``with``.

        Args:
            path: the folder; it is created.
            identity: what decides about the scores: input, function and options.

        Raises:
            ConfigError: the folder contains anything else, or the records of a different run with a score, or another
                process writes it.
        """
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        with contextlib.ExitStack() as stack:
            # The folder itself is locked, so no file is left behind; the kernel ends the lock of a killed process.
            lock = os.open(path, os.O_RDONLY)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run is writing {path}: wait for it, or choose another --output") from None
            folder._begin(identity)
            # A process has one writer for a folder, which may have failed in an earlier run of this process.
            folder.writer.files.failure = None
            stack.callback(folder.writer.flush, _FLUSH_S)
            yield folder

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the records."""
        with contextlib.suppress(NoRecordsError):
            yield from RecordsReader(self.path).rows()

    def forget(self, names: Collection[str]) -> None:
        """Remove the records of rows, so that these are scored again."""
        for path in self.path.glob("*.jsonl") if names else ():
            kept = path.with_suffix(".tmp")
            with path.open("rb") as lines, kept.open("wb") as file:
                file.writelines(line for line in lines if (parse_line(line) or {}).get("uid") not in names)
            # A whole file takes the place of the old one: a process that is killed here loses no records.
            kept.replace(path)

    def check_written(self) -> None:
        """Raise the error of the first record that could not be written, if any."""
        if self.writer.files.failure is not None:
            raise self.writer.files.failure

    def flush(self) -> None:
        """Wait until all records are written.

        Raises:
            OSError: one could not be written.
        """
        if not self.writer.flush(_FLUSH_S):
            raise OSError(f"the records were not written to {self.path} within {_FLUSH_S:g} s")
        self.check_written()

    def _begin(self, identity: Mapping[str, Any]) -> None:
        """Check that the folder is empty or of this run, and write the run's identity into `RUN`.

        The records of failed rows, and of those that the budget left out, are removed: they are scored again.
        """
        file = self.path / RUN
        if any(self.path.iterdir()) and not file.exists():
            raise ConfigError(f"{self.path} was not written by this command: choose another --output")
        # Digests, not the values, which may be secrets.
        run = {name: _digest(value) for name, value in identity.items()}
        before = json.loads(file.read_text()) if file.exists() else run
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        unfinished = {row["uid"] for row in self.rows() if row["outcome"] == Outcome.FAILED or row.get("over_budget")}
        if changed and any(row["uid"] not in unfinished for row in self.rows()):
            raise ConfigError(
                f"{self.path} has the records of a run with another {' and another '.join(changed)}: choose another "
                "--output, or delete the folder"
            )
        self.forget(unfinished)
        written = file.with_suffix(".tmp")
        written.write_text(json.dumps(run, indent=1))
        written.replace(file)


def _digest(value: Any) -> str:
    text = json.dumps(json.loads(to_json(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_export(source: Inputs, file: Path) -> None:
    """Check that the file can be written. Called before the first row is scored.

    Raises:
        ConfigError: it is not named ``.jsonl``, its folder cannot be created, or it is an input.
    """
    if file.suffix != ".jsonl" or file.is_dir() or file.resolve().is_relative_to(source.path.resolve()):
        raise ConfigError(f"--export {file}: name a JSONL file, .jsonl, that is not the input, nor in it")
    file.parent.mkdir(parents=True, exist_ok=True)


def write_scores(source: Inputs, folder: ScoredFolder, file: Path) -> None:
    """Write all rows of the inputs, in order, with their scores; the file is replaced when all are written."""
    results: dict[str, dict[str, Any]] = {}
    reader = RecordsReader(folder.path)
    for record in reader.rows():
        components = {**(record.get("components") or {}), **((reader.text(record) or {}).get("components") or {})}
        values = (record["reward"], record["outcome"], record["error"], components)
        results[record["uid"]] = dict(zip(COLUMNS, values, strict=True))
    temporary = file.with_name(f".partial-{file.name}")
    with temporary.open("wb") as lines:
        for row in source.rows():
            kept = {f"input_{name}" if name in COLUMNS else name: value for name, value in row.columns.items()}
            lines.write(to_json({**kept, **results[row.name]}) + b"\n")
    temporary.replace(file)


# ---- the command ----


def score(
    context: typer.Context,
    function: cli_options.Function,
    file: cli_options.Rollouts,
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
        typer.Option(metavar="FILE", help="When all rows are scored, write them with their scores, as JSONL."),
    ] = None,
    field: cli_options.FieldPaths = None,
    reward_kwarg: cli_options.RewardKwargs = None,
    manager: cli_options.Manager = "naive",
    router_address: cli_options.RouterAddress = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rows that are scored at a time.")] = 64,
    timeout: cli_options.Timeout = 300,
    isolation: cli_options.Isolation = "thread",
    option: cli_options.MoreOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score stored rollouts with a reward function.

    The function is called as in training: by keyword, with the arguments that
    its signature names and the rows have.

    [bold]Example[/]

      reward-loop score reward.py:compute_score rollouts.jsonl -f solution_str=output -f ground_truth=gts

    Every row gets a record, as a sample of a training run: read them with
    [cyan]reward-loop report[/] and [cyan]view[/]. Run the same command again to resume
    an interrupted run: only rows without a record, failed ones, and those that
    the budget left out are scored. What the function prints goes to stderr.
    To try a function that costs money, score a few rows:
    head -n 20 rollouts.jsonl > few.jsonl.

    -O sets the other options of the reward loop, such as -O on_failed=raise,
    -O max_failed_share=0.1, or, with --isolation process, -O max_processes=4.

    Exit status: 0 rows were scored, 1 the run was stopped by an error, or no
    row was scored, 2 wrong usage, 130 Ctrl-C.
    """
    paths = cli_options.pairs(field, "--field")
    reward_kwargs = cli_options.values(reward_kwarg, "--reward-kwarg")
    given = {"timeout": timeout or None, "max_threads": concurrency, "isolation": isolation}
    config = cli_options.config(context, option, given)
    if config.log_dir is not None:
        raise ConfigError("-O log_dir has no effect: the records are in the folder --output")
    source = Inputs(file)
    path = output or _default_output(file)
    # Absolute: the function may change the working directory.
    config = config.model_copy(update={"log_dir": str(path.absolute()), "record": _keeping_all(config.record)})
    if file.is_dir() and path.resolve().is_relative_to(file.resolve()):
        raise ConfigError(f"--output {path} is in the folder that is scored: choose another one")
    if export is not None:
        check_export(source, export)
    with reserve_stdout() as stdout:
        scorer = load_scorer(function, manager, config, reward_kwargs=reward_kwargs, router_address=router_address)
        fields = Fields(paths, requires=scorer.requires)
        check_fields(source.rows(), str(file), fields)
        # All that decides about the scores. What affects only the speed may change when a run is resumed.
        identity = {
            "input": source.identity(),
            "function": [function, source_hash(scorer.loaded), reward_kwargs, manager],
            "field mapping": paths,
            "policy": [config.on_failed, config.on_unscored, config.default_score],
        }
        progress = ScoringProgress(_err)
        with ScoredFolder.open(path, identity) as folder:
            try:
                resumed = score_rows(
                    source, folder, scorer.manager, fields=fields, concurrency=concurrency, on_row=progress.completed
                )
            except (KeyboardInterrupt, RewardLoopError, OSError) as error:
                if not isinstance(error, ConfigError):
                    error.add_note(f"The records of the completed rows are in {path}: rerun the command to resume.")
                raise
            # Within the block, in which the folder is locked: another run could change the records.
            report = summary_of(path)
            if export is not None:
                write_scores(source, folder, export)
        count, counts = report["samples"], report["outcomes"]
        if as_json:
            run = {"rows": count, "resumed": resumed, "records": str(path), "export": export and str(export)}
            stdout.write(encode({**report, **run}).decode() + "\n")
        else:
            out = console(stdout)
            show_report(report, out)
            out.print(f"\nrows: {count}" + (f", {resumed} of them by an earlier run" if resumed else ""))
            out.print(f"records: {escape(str(path))}; in the browser: reward-loop view {escape(str(path))}")
    if counts["failed"] or report["over_budget"]:
        _err.print(
            f"{counts['failed']} rows failed, and the budget left {report['over_budget']} without a score. To score "
            "them, run the same command again, which has the whole budget again."
        )
    if not counts["scored"]:
        _err.print(f"[bold red]error:[/] no row was scored: {outcomes_of(report)}")
        raise typer.Exit(1)


def _keeping_all(record: RecordConfig) -> RecordConfig:
    """Return the options of records without the default of the largest size: no text is deleted."""
    return record if "max_bytes" in record.model_fields_set else record.model_copy(update={"max_bytes": MAX_BYTES})


def _default_output(source: Path) -> Path:
    """Return the folder of the records, beside the input."""
    path = source.resolve()
    return path.parent / f"{path.name}.scored" if path.is_dir() else source.with_suffix(".scored")
