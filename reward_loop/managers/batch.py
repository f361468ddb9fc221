"""The manager `batch`: one call of a batched reward function for several samples."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.batcher import Batcher
from reward_loop.managers.registry import register
from reward_loop.scoring import ListScoringFunction
from reward_loop.types import RewardResult, RewardSample

__all__ = ["BatchRewardLoopManager"]


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
        # Separate batches for training and validation, because they are separate traffic classes of the limits.
        return await self._batcher.score(sample, sample.validate, batch.max_batch_size, batch.max_wait_ms / 1000)
