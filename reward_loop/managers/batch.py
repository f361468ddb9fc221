"""`Batcher`, which collects samples into batches, and the manager `batch`, which scores each batch in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError, IncompleteGroupError
from reward_loop.managers.base import RewardLoopManagerBase, verl_options
from reward_loop.managers.registry import register
from reward_loop.records import ActiveBatch, ActiveSample, current
from reward_loop.scoring import ListScoringFunction
from reward_loop.scoring.results import failed
from reward_loop.types import RewardResult, RewardSample

Score = Callable[[list[RewardSample]], Awaitable[Sequence[RewardResult]]]
"""Scores a batch; returns one result per sample, in order."""


class Batcher:
    """Collects samples by key. A batch is scored when it is full, or when its first sample has waited too long."""

    def __init__(self, score: Score, expired: Score | None = None, *, name: str = "batch") -> None:
        """Create a batcher without samples.

        Args:
            score: scores a full batch.
            expired: scores an incomplete batch after its timeout; by default ``score``.
            name: the name of a batch in the watchdog's messages.
        """
        self._waits_for = f"the other samples of its {name}"
        self._score = score
        self._expired = expired or score
        self._open: dict[Hashable, _Batch] = {}

    async def score(self, sample: RewardSample, key: Hashable, size: int, wait: float) -> RewardResult:
        """Add the sample to the batch of its key, and return its result.

        Args:
            sample: the sample to score.
            key: identifies the batch.
            size: the number of samples in a full batch.
            wait: seconds that the first sample of a batch waits for the others.
        """
        loop = asyncio.get_running_loop()
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch(loop.call_later(wait, self._close, key, self._expired))
        result: asyncio.Future[RewardResult] = loop.create_future()
        active = current()
        batch.members[result] = (sample, active)
        if active is not None:
            active.batching = self._waits_for
        if len(batch.members) >= size:
            self._close(key, self._score)
        try:
            return await result
        finally:
            # Cancelling a task also cancels the future that it awaits.
            if result.cancelled():
                self._leave(key, batch, result)

    def _close(self, key: Hashable, score: Score) -> None:
        batch = self._open.pop(key)
        batch.timer.cancel()
        batch.call = asyncio.get_running_loop().create_task(batch.run(score))

    def _leave(self, key: Hashable, batch: _Batch, result: asyncio.Future[RewardResult]) -> None:
        """Remove a sample whose task was cancelled. Cancel the call if all its samples are cancelled."""
        if batch.call is None:
            del batch.members[result]
            if not batch.members:
                batch.timer.cancel()
                del self._open[key]
        elif all(member.cancelled() for member in batch.members):
            batch.call.cancel()


@dataclass(slots=True)
class _Batch:
    timer: asyncio.TimerHandle
    members: dict[asyncio.Future[RewardResult], tuple[RewardSample, ActiveSample | None]] = field(default_factory=dict)
    """By the future of its result; a sample scored without a manager is not active."""
    call: asyncio.Task[None] | None = None
    """The task that scores the batch, once the batch is closed. The batch owns it."""

    async def run(self, score: Score) -> None:
        samples = [sample for sample, _ in self.members.values()]
        active = [active for _, active in self.members.values() if active is not None]
        try:
            # The task inherits the context of one member; `ActiveBatch` attributes its requests to all members.
            with ActiveBatch(active) if active else contextlib.nullcontext():
                # `strict`: of another number of results, none can be assigned to its sample.
                results = dict(zip(self.members, await score(samples), strict=True))
        except BaseException as error:
            for member in self.members:
                if not member.done():
                    if isinstance(error, asyncio.CancelledError):
                        member.cancel()
                    else:
                        member.set_exception(error)
            if not isinstance(error, Exception):
                raise
            # The samples raise the error; raised here too, asyncio would log it as never retrieved.
            return
        for member, result in results.items():
            if not member.done():
                member.set_result(result)


@register("batch")
class BatchRewardLoopManager(RewardLoopManagerBase):
    """Collects samples for a few milliseconds, and scores them in one call of a batched function.

    The function has the signature of verl's batch manager: it takes ``data_sources``, ``solution_strs``,
    ``ground_truths`` and ``extra_infos``, and returns a list. Options: ``reward_loop.batch``.
    """

    function_type = ListScoringFunction

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batcher = Batcher(self.score_many)

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Score the sample in one batch with samples that arrive shortly after it."""
        batch = self.options.batch
        # A batch has one traffic class of the limits.
        return await self._batcher.score(sample, sample.traffic_class, batch.max_batch_size, batch.max_wait_ms / 1000)


@register("group")
class GroupRewardLoopManager(RewardLoopManagerBase):
    """Waits for all samples of a prompt, and scores them in one call of a batched function, to rank or compare them.

    Samples with the same ``group`` (verl's ``uid``) form a group. The group size is the sample's ``group_size``,
    otherwise ``reward_loop.group.size``, otherwise verl's ``actor_rollout_ref.rollout.n``. If the group is incomplete
    ``reward_loop.group.timeout`` seconds after its first sample, all its samples fail.
    """

    function_type = ListScoringFunction
    needs_group = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._size = self.options.group.size or verl_options(self.config, "actor_rollout_ref.rollout.n")
        self._batcher = Batcher(self.score_many, self._incomplete, name="group")
        self._expired: dict[str, str] = {}

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Score the sample in one call with the other samples of its group.

        Raises:
            ConfigError: the sample's group or the group size is unknown.
        """
        if sample.group is None:
            raise ConfigError(
                "the manager `group` needs the group of each sample: set RewardSample.group, or the column "
                "`uid` of a DataProto"
            )
        size = sample.group_size or self._size
        if size is None:
            raise ConfigError(
                "the manager `group` needs the size of each group: set reward_loop.group.size, or "
                "RewardSample.group_size"
            )
        if (problem := self._expired.get(sample.group)) is not None:
            return failed(IncompleteGroupError(problem))
        return await self._batcher.score(sample, sample.group, size, self.options.group.timeout)

    async def _incomplete(self, samples: list[RewardSample]) -> list[RewardResult]:
        first = samples[0]
        assert first.group is not None
        timeout = self.options.group.timeout
        names = listing(str(sample.uid) for sample in samples)
        problem = (
            f"group {first.group}: only {len(samples)} of {first.group_size or self._size} samples arrived within "
            f"{timeout:g} s: {names}. A rollout was lost, or takes longer than reward_loop.group.timeout, or went to "
            "another reward worker: verl's own reward loop does that if reward.num_workers is above 1"
        )
        # Samples that arrive late fail at once, because the others have already failed.
        self._expired[first.group] = problem
        # Not kept for the whole run: each lost group would take memory until its end.
        asyncio.get_running_loop().call_later(timeout, self._expired.pop, first.group, None)
        return [failed(IncompleteGroupError(problem)) for _ in samples]
