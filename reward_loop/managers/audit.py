"""Asks a judge a second time for a share of the samples, and compares the two scores."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.records import ActiveSample, Records, exchanges_of, records
from reward_loop.records.files import AUDIT
from reward_loop.records.rows import new_row
from reward_loop.types import RewardResult, RewardSample

__all__ = ["Audit"]

logger = logging.getLogger(__name__)

MAX_RUNNING = 64
"""The largest number of second calls in flight. Above it, samples are not chosen: the judge is too slow for them."""


class Audit:
    """Scores a random share of the scored training samples a second time, in tasks of its own.

    A second call never delays a reward and never changes one. It acquires the same limits, and uses the same budget,
    deadline and retries as the first call. It is not counted as a sample: neither in the records of the samples nor in
    the share of failures.

    The object owns its tasks: `close` cancels them.

    Args:
        score: scores a sample: ``score_one`` of the manager.
        function: the function's name, for the list of active samples.
        options: the options of the run. With ``log_dir``, each second call is a row in its sub-folder ``audit``.
        needs_group: whether the manager scores all samples of a prompt together.

    Raises:
        ConfigError: the score of one sample cannot be repeated: the manager needs whole groups, or a cache would
            return the first score again.
    """

    def __init__(
        self,
        score: Callable[[RewardSample], Awaitable[RewardResult]],
        function: str,
        options: RewardLoopConfig,
        needs_group: bool = False,
    ) -> None:
        if needs_group:
            raise ConfigError("audit.reask must be 0 with a manager that compares the samples of a prompt")
        if options.cache.enabled:
            raise ConfigError("audit.reask needs cache.enabled=False: the cache would return the first score again")
        self._score = score
        self._function = function
        self._options = options
        self._records: Records | None = None
        if options.log_dir:
            self._records = records(Path(options.log_dir) / AUDIT, options.record.max_bytes)
        self._random = random.Random()
        self._running: set[asyncio.Task[None]] = set()
        self._counts = _no_counts()

    def ask_again(self, sample: RewardSample, first: RewardResult) -> None:
        """Start a second call for a sample if it is chosen. Returns at once.

        Args:
            sample: the sample.
            first: its result. Only scored training samples are chosen.
        """
        if first.score is None or sample.validate or len(self._running) >= MAX_RUNNING:
            return
        if self._random.random() < self._options.audit.reask:
            task = asyncio.create_task(self._ask(sample, first.score))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def take(self) -> dict[str, Any]:
        """Return the counts since the last call, and start again from zero.

        Returns:
            ``asked``: second calls that have ended; ``agreed``: those whose score agrees with the first;
            ``without_score``: those without a score; ``differences``: the absolute differences of the others.
        """
        taken, self._counts = self._counts, _no_counts()
        return taken

    def close(self) -> None:
        """Cancel the second calls in flight. Call it on the event loop."""
        for task in self._running:
            task.cancel()

    async def _ask(self, sample: RewardSample, first: float) -> None:
        with ActiveSample(sample, self._function, self._options.watchdog_s, self._records is not None) as active:
            try:
                second = await self._score(sample)
            except Exception as error:  # an audit must not stop a run
                logger.warning("audit.reask: the second call of sample %s: %s", sample.uid, shorten(error))
                return
        counts = self._counts
        counts["asked"] += 1
        agrees = None
        if second.score is None:
            counts["without_score"] += 1
        else:
            difference = abs(second.score - first)
            agrees = difference <= self._options.audit.tolerance
            counts["agreed"] += agrees
            counts["differences"].append(difference)
        if self._records is not None:
            self._records.write_rows([_row(sample, first, second, agrees, active)])


def _no_counts() -> dict[str, Any]:
    return {"asked": 0, "agreed": 0, "without_score": 0, "differences": []}


def _row(
    sample: RewardSample, first: float, second: RewardResult, agrees: bool | None, active: ActiveSample
) -> dict[str, Any]:
    return new_row(
        AUDIT,
        uid=sample.uid,
        group=sample.group,
        step=sample.step,
        function=active.function,
        score=first,
        second_score=second.score,
        agrees=agrees,
        outcome=second.outcome,
        error=second.error,
        seconds=active.seconds,
        exchanges=exchanges_of(active),
    )
