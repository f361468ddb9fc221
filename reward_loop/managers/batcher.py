"""Collect the samples that one call scores together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field

from reward_loop.records import ActiveBatch, ActiveSample, current
from reward_loop.types import RewardResult, RewardSample

__all__ = ["SampleCollector"]

Score = Callable[[list[RewardSample]], Awaitable[Sequence[RewardResult]]]
"""Scores samples together, each with a result, in order."""


class SampleCollector:
    """Scores samples with the same key together, once enough are there, or once the first has waited too long."""

    def __init__(self, score: Score, expired: Score | None = None) -> None:
        """Keep the functions.

        Args:
            score: is called for the samples of a key that are complete.
            expired: is called instead for those that waited too long; by default the same.
        """
        self._score = score
        self._expired = expired or score
        self._open: dict[Hashable, _Batch] = {}

    async def score(self, sample: RewardSample, key: Hashable, size: int, wait: float) -> RewardResult:
        """Return the sample's result.

        Args:
            sample: what to score.
            key: names those that it belongs to.
            size: how many they are, at most.
            wait: how many seconds the first of them waits for the others.
        """
        loop = asyncio.get_running_loop()
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch(loop.call_later(wait, self._close, key, self._expired))
        result: asyncio.Future[RewardResult] = loop.create_future()
        batch.members[result] = sample
        if (active := current()) is not None:
            batch.active[result] = active
        if len(batch.members) >= size:
            self._close(key, self._score)
        try:
            return await result
        finally:
            if result.cancelled():
                self._leave(key, batch, result)

    def _close(self, key: Hashable, score: Score) -> None:
        batch = self._open.pop(key)
        batch.timer.cancel()
        batch.call = asyncio.get_running_loop().create_task(batch.run(score))

    def _leave(self, key: Hashable, batch: _Batch, result: asyncio.Future[RewardResult]) -> None:
        """Forget a sample whose task was cancelled; the last one takes the call with it."""
        if batch.call is None:
            del batch.members[result]
            batch.active.pop(result, None)
            if not batch.members:
                batch.timer.cancel()
                del self._open[key]
        elif all(member.cancelled() for member in batch.members):
            batch.call.cancel()


@dataclass(slots=True)
class _Batch:
    timer: asyncio.TimerHandle
    members: dict[asyncio.Future[RewardResult], RewardSample] = field(default_factory=dict)
    active: dict[asyncio.Future[RewardResult], ActiveSample] = field(default_factory=dict)
    """The members as active samples; members that are scored without a manager are missing."""
    call: asyncio.Task[None] | None = None
    """Owned here; the members wait for it, and hold the batch."""

    async def run(self, score: Score) -> None:
        active = list(self.active.values())
        try:
            # The task has the context of one member: without this, its requests would be booked to that one.
            with ActiveBatch(active) if active else contextlib.nullcontext():
                results = dict(zip(self.members, await score(list(self.members.values())), strict=True))
        except BaseException as error:
            for member in self.members:
                if not member.done():
                    if isinstance(error, asyncio.CancelledError):
                        member.cancel()
                    else:
                        member.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for member, result in results.items():
            if not member.done():
                member.set_result(result)
