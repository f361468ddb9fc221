"""Scores a file of rollouts.

Invariants:

- The input is read as needed: while rows are scored, only the rows in flight are in memory, and for parquet also the
  current record batch.
- The result of a completed row is in `PartialResults` before its worker takes the next row, so a run can be resumed.
- The output has every row of the input, in the order of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from reward_loop._util.signals import run
from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.scorer import reward_of
from reward_loop.offline.compression import import_zstandard
from reward_loop.offline.finished import FinishedOutput
from reward_loop.offline.inputs import Inputs
from reward_loop.offline.output import write_output, write_rows
from reward_loop.offline.parquet import import_parquet
from reward_loop.offline.partial import PartialResults
from reward_loop.offline.rows import Fields, Row, check_fields, check_format, is_parquet
from reward_loop.records.report import Report
from reward_loop.types import RESERVED_KEYS, Outcome, Reward, finite_number

__all__ = ["Summary", "for_each", "partial_of", "score_file"]


@dataclass(slots=True)
class Summary:
    """Summary of a run."""

    report: Report = field(default_factory=Report)
    """The summary of the rows, as of records."""
    resumed: int = 0
    """Number of rows whose results come from an earlier run."""
    seconds: float = 0.0
    """Wall-clock time of this run, in seconds."""

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rows with each outcome."""
        return self.report.outcomes

    @property
    def rows(self) -> int:
        """Number of rows of the input."""
        return self.report.samples

    @property
    def mean(self) -> float | None:
        """Mean score of the rows that have a score, default scores included; ``None`` if no row has one."""
        return self.report.reward.to_dict()["mean"]

    @property
    def rows_per_second(self) -> float:
        """Throughput of this run, without the rows of an earlier run."""
        return (self.rows - self.resumed) / self.seconds if self.seconds else 0.0

    def add(self, row: Row, record: Mapping[str, Any]) -> None:
        """Add the record of one row."""
        info = record["reward_extra_info"]
        scored = record["score"] if record["outcome"] == Outcome.SCORED else None
        self.report.add(
            {
                "uid": row.name,
                "outcome": record["outcome"],
                "score": scored,
                "reward": record["score"],
                "error": record["error"],
                "masked": info.get("reward_masked", False),
                "components": {name: value for name, value in info.items() if name not in RESERVED_KEYS},
                "work_s": info.get("reward_seconds", 0.0),
            }
        )


def partial_of(source: Inputs, output: Path | IO[bytes]) -> Path:
    """Return the path of the partial results, which contain the completed rows until the output is complete."""
    if isinstance(output, Path):
        return output.with_name(output.name + ".partial")
    return source.partial_for_stdout()


def score_file(
    source: Inputs,
    output: Path | IO[bytes],
    manager: Any,
    *,
    fields: Fields,
    identity: Mapping[str, Any] | None = None,
    concurrency: int = 64,
    restart: bool = False,
    retry_failed: bool = False,
    on_row: Callable[[int, Mapping[str, Any] | None], None] = lambda done, record: None,
) -> Summary:
    """Score every row of ``source`` and write ``output``; runs its own event loop.

    The file ``<output>.partial`` contains the completed rows until the output is complete. If it exists, only the
    other rows are scored. If rows of the output failed, the file ``<output>.run`` identifies the run for
    ``retry_failed``.

    Args:
        source: the input.
        output: the file, or a binary stream, to which JSONL is written when all rows are scored.
        manager: a reward manager; its ``run_single`` receives a `RewardSample` for each row.
        fields: the field mapping.
        identity: what identifies the run in addition to the input: the function and its options.
        concurrency: maximum number of rows in flight.
        restart: discard an interrupted run, and overwrite an existing output.
        retry_failed: score the failed rows of an interrupted run, or of an existing output, again.
        on_row: called with the number of completed rows and the result of the latest one: after each row, and at the
            start, without a result.

    Raises:
        ConfigError: the output has an unsupported format, would be overwritten, or belongs to a different run; or
            ``fields`` fits no row.
        RewardLoopError: a policy or the bound on failures stopped the run. The completed rows are kept.
    """
    partial = partial_of(source, output)
    header = {"journal": 1, "input": source.identity(), **(identity or {})}
    finished = None
    if isinstance(output, Path):
        _check_output(source, output)
        finished = FinishedOutput(output)
        resumes = output.exists() and not restart and (finished.is_identified or not partial.exists())
        if resumes:
            if not retry_failed and not partial.exists():
                raise ConfigError(f"{output} exists{finished.advice()}")
            finished.check(source, header)
    check_fields(source.rows(), source.name, fields)
    if isinstance(output, Path):
        _make_folder(output)
    started = time.perf_counter()
    with PartialResults(partial, header, restart=restart) as results:
        if retry_failed:
            results.forget_failed()
        if finished is not None:
            if resumes:
                finished.take_over(results)
            else:
                finished.forget()
        resumed = len(results)
        on_row(resumed, None)

        async def score(row: Row) -> None:
            reward = await reward_of(manager, fields.to_sample(row), row.name)
            record = _record(reward, f"sample {row.name}: {type(manager).__name__}.run_single")
            results.append(row.index, record)
            on_row(len(results), record)

        todo = (row for row in source.rows() if row.index not in results)
        with contextlib.chdir("."):  # a function in a thread may change the working directory
            run(for_each(todo, concurrency, score))
        summary = Summary(resumed=resumed, seconds=time.perf_counter() - started)

        def result_of(row: Row) -> dict[str, Any]:
            record = results[row.index]
            summary.add(row, record)
            return record

        if isinstance(output, Path):
            write_output(source, output, result_of)
        else:
            write_rows(source, output, result_of)
        if finished is not None:
            if summary.outcomes[Outcome.FAILED]:
                finished.identify(header)
            else:
                finished.forget()
        results.delete()
    return summary


def _check_output(source: Inputs, output: Path) -> None:
    check_format(output)
    # A missing package is reported before the first row is scored.
    if output.suffix.lower() == ".zst":
        import_zstandard()
    if is_parquet(output):
        import_parquet()
    if output.exists() and not output.is_file():
        raise ConfigError(
            f"the output must be a file of its own, and {output} is a folder or a device: -o - writes to stdout"
        )
    for path in source.paths:
        if path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                f"the output {output} must not be in the folder that is scored, {path}: name it by --output"
            )
        if output.exists() and output.samefile(path):
            raise ConfigError(f"the output would overwrite the input: {path}")


def _make_folder(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder of the output {output} cannot be created: {error.strerror}") from error


async def for_each(rows: Iterator[Row], concurrency: int, score: Callable[[Row], Awaitable[None]]) -> None:
    """Call ``score`` for each row, at most ``concurrency`` rows at a time. Only the rows in flight are in memory.

    Raises:
        RewardLoopError | OSError: the first of these errors that ``score`` raised; it has stopped the others.
    """

    async def worker() -> None:
        for row in rows:  # the workers share one iterator
            await score(row)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(worker())
    except* (RewardLoopError, OSError) as group:
        stopped: BaseException = group
        while isinstance(stopped, BaseExceptionGroup):
            stopped = stopped.exceptions[0]
    else:
        return
    raise stopped


def _record(reward: Reward, method: str) -> dict[str, Any]:
    """Return the record of a reward. If the manager reports no outcome, the outcome is *scored*."""
    extra_info = dict(reward.get("reward_extra_info") or {})
    masked = extra_info.get("reward_masked", False)
    score = None if masked else finite_number(reward["reward_score"])
    outcome, error = extra_info.get("reward_outcome", str(Outcome.SCORED)), extra_info.get("reward_error") or None
    if score is None and not masked:
        outcome = str(Outcome.FAILED)
        error = f"{method} returned the score {shorten(reward['reward_score'])}, which is not a finite number"
    return {"score": score, "outcome": outcome, "error": error, "reward_extra_info": extra_info}
