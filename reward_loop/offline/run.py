"""Scores the rows of the inputs, and shows the progress. The results are the records of the rows.

Invariants:

- The input is read as needed: while rows are scored, only the rows in flight are in memory, and for parquet also the
  current record batch. If the manager needs groups, all rows are in memory: a group may be anywhere in the input.
- A row whose record has been written is not scored again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from reward_loop._util.signals import run
from reward_loop._util.text import rounded
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.failures import Failures, on_one_line
from reward_loop.managers.scorer import returns_results, scored
from reward_loop.offline.fields import Fields
from reward_loop.offline.folder import ScoredFolder
from reward_loop.offline.inputs import Inputs
from reward_loop.records import ActiveSample
from reward_loop.types import Outcome, RewardResult, RewardSample

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

    async def score(sample: RewardSample) -> None:
        nonlocal done
        if is_recording:
            result, _ = await scored(manager, sample, sample.uid)
        else:
            result = await _recorded(manager, sample, folder)
        # The records are the only result: without them, further calls would be in vain.
        folder.check_written()
        done += 1
        on_row(done, result)

    async def score_together(samples: list[RewardSample]) -> None:
        if len(samples) == 1:
            await score(samples[0])
        else:
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


async def _recorded(manager: Any, sample: RewardSample, folder: ScoredFolder) -> RewardResult:
    """Return the result of a manager that records no samples, or changes rewards after that, and record it."""
    with ActiveSample(sample, type(manager).__name__) as active:
        result, _ = await scored(manager, sample, sample.uid)
        result = replace(result, total_s=active.seconds)
        folder.writer.write_sample(active, result)
    return result


class ScoringProgress:
    """Prints now and then how many rows are complete, and the failures and the mean score of this run's rows."""

    def __init__(self, total: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._failures = Failures()
        self._causes = self._failed = self._scores = 0
        self._sum = 0.0

    def completed(self, rows: int, result: RewardResult | None) -> None:
        """Count a result; ``rows`` are complete, earlier runs included. ``result`` is the latest one of this run."""
        if result is not None:
            self._failed += result.outcome is Outcome.FAILED
            if result.reward is not None:
                self._scores += 1
                self._sum += result.reward
            # The first error of each cause; the summary at the end has the numbers.
            if self._failures.add(result) and self._causes < MAX_CAUSES:
                self._causes += 1
                what = f"{result.outcome} (further rows with this cause are only counted)"
                self._console.print(f"{what}: {escape(on_one_line(result.error or result.cause or ''))}")
        if self._clock() >= self._last_line + LINE_S:
            self._last_line = self._clock()
            mean = f", mean {rounded(self._sum / self._scores)}" if self._scores else ""
            self._console.print(f"scoring: {rows:,} of {self._total:,} rows, {self._failed:,} failed{mean}")
