"""Score a file: bounded in memory, resumable, in order."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_loop._util.signals import run
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.offline.journal import Journal
from reward_loop.offline.output import write_output
from reward_loop.offline.rows import Fields, Row, check_format, check_input, read_rows
from reward_loop.types import Outcome, Reward

__all__ = ["Summary", "partial_of", "score_file"]

_KEPT = 5


@dataclass(slots=True)
class Summary:
    """What a run gave."""

    outcomes: Counter[str] = field(default_factory=Counter)
    total: float = 0.0
    """Sum of all scores, those of the policy ``default`` included."""
    scores: int = 0
    resumed: int = 0
    """Rows that an earlier, interrupted run had done."""
    seconds: float = 0.0
    """Wall-clock time of this run."""
    slowest: list[tuple[float, str]] = field(default_factory=list)
    """Seconds and name of the slowest rows, slowest first."""
    errors: list[str] = field(default_factory=list)
    """The first errors."""

    @property
    def rows(self) -> int:
        """All rows of the input."""
        return self.outcomes.total()

    @property
    def mean(self) -> float | None:
        """Mean over the rows that have a score."""
        return self.total / self.scores if self.scores else None

    @property
    def rows_per_second(self) -> float:
        """Throughput of this run."""
        return (self.rows - self.resumed) / self.seconds if self.seconds else 0.0

    def add(self, row: Row, record: Mapping[str, Any]) -> None:
        """Count one row."""
        self.outcomes[record["outcome"]] += 1
        if record["score"] is not None:
            self.total += record["score"]
            self.scores += 1
        if record["error"] and len(self.errors) < _KEPT:
            self.errors.append(record["error"])
        heapq.heappush(self.slowest, (record["reward_extra_info"].get("reward_seconds", 0.0), row.name))
        if len(self.slowest) > _KEPT:
            heapq.heappop(self.slowest)


def partial_of(output: Path) -> Path:
    """Where completed rows are kept until the output is there."""
    return output.with_name(output.name + ".partial")


def score_file(
    source: Path,
    output: Path,
    manager: Any,
    *,
    fields: Fields,
    identity: Mapping[str, Any] | None = None,
    concurrency: int = 64,
    restart: bool = False,
    retry_failed: bool = False,
    on_row: Callable[[int], None] = lambda done: None,
) -> Summary:
    """Score every row of ``source`` and write ``output``; runs its own event loop.

    Completed rows are kept in ``<output>.partial`` until the output is there. Where that file exists, the run goes on
    with the rows that are missing from it.

    Args:
        source: JSONL or, by its suffix, parquet.
        output: JSONL or, by its suffix, parquet.
        manager: a reward manager; its ``run_single`` is given a `RewardSample` for each row.
        fields: where the parts of a sample are found.
        identity: what makes two runs the same, beside the input file: the function and its options.
        concurrency: how many rows are in work at a time.
        restart: discard an interrupted run, and overwrite an existing output.
        retry_failed: when going on with an interrupted run, call the function again for rows that failed.
        on_row: called with the number of rows that are done, at first and whenever it grows.

    Raises:
        ConfigError: a file is missing, or in the way.
        RewardLoopError: the run was stopped, by a policy or by the bound on failures. Completed rows are kept.
    """
    check_input(source)
    check_format(output)
    if output.exists() and not output.is_file():
        raise ConfigError(f"the output must be a file of its own, and {output} is a folder or a device")
    if output.exists() and output.samefile(source):
        raise ConfigError(f"the output would overwrite the input: {source}")
    partial = partial_of(output)
    if output.exists() and not partial.exists() and not restart:
        raise ConfigError(f"{output} exists: choose another output, or replace it: --restart")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the output {output} has no folder, and none can be made: {error.strerror}") from error
    stat = source.stat()
    header = {
        "journal": 1,
        "input": {"path": str(source.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns},
        **(identity or {}),
    }
    started = time.perf_counter()
    with Journal(partial, header, restart=restart) as journal:
        if retry_failed:
            journal.forget_failed()
        resumed = len(journal)
        on_row(resumed)
        todo = (row for row in read_rows(source) if row.index not in journal)
        run(_score_rows(todo, manager, fields, journal, concurrency, on_row))
        summary = Summary(resumed=resumed, seconds=time.perf_counter() - started)

        def result_of(row: Row) -> dict[str, Any]:
            record = journal[row.index]
            summary.add(row, record)
            return record

        write_output(source, output, result_of)
        journal.delete()
    summary.slowest.sort(reverse=True)
    return summary


async def _score_rows(
    rows: Iterator[Row],
    manager: Any,
    fields: Fields,
    journal: Journal,
    concurrency: int,
    on_row: Callable[[int], None],
) -> None:
    async def worker() -> None:
        # All workers draw from one iterator, so that no more rows are in memory than are in work.
        for row in rows:
            journal.append(row.index, _record(await _run_single(manager, row, fields)))
            on_row(len(journal))

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


async def _run_single(manager: Any, row: Row, fields: Fields) -> Reward:
    try:
        reward: Reward = await manager.run_single(fields.to_sample(row))
    except RewardLoopError:
        raise
    except Exception as error:
        # The manager's own fault, not the reward function's: it would be the same for every row.
        raise RewardLoopError(
            f"{row.name}: {type(manager).__name__}.run_single raised {type(error).__name__}: {error}"
        ) from error
    return reward


def _record(reward: Reward) -> dict[str, Any]:
    """Return what the journal keeps; a manager that states no outcome has scored."""
    extra_info = dict(reward.get("reward_extra_info") or {})
    masked = extra_info.get("reward_masked", False)
    return {
        "score": None if masked else reward["reward_score"],
        "outcome": extra_info.get("reward_outcome", str(Outcome.SCORED)),
        "error": extra_info.get("reward_error") or None,
        "reward_extra_info": extra_info,
    }
