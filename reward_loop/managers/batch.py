"""The managers `batch` and `group`, which score several samples in one call of a batched function."""

from __future__ import annotations

from typing import Any

from reward_loop.errors import ConfigError, IncompleteGroupError
from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.groups import Batcher
from reward_loop.managers.registry import register
from reward_loop.scoring import ListScoringFunction
from reward_loop.scoring.results import failed
from reward_loop.types import RewardResult, RewardSample


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
    otherwise ``reward_loop.group.size``, otherwise verl's ``actor_rollout_ref.rollout.n``. Rollouts that fail before
    they are scored are not awaited. If the caller does not report them, as with requests over HTTP, all samples of a
    group fail if ``reward_loop.group.timeout`` seconds pass without the others.
    """

    function_type = ListScoringFunction
    needs_group = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups = self.collect_groups(self.score_many, "the manager `group`")

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
        assert self.groups is not None
        try:
            result: RewardResult = await self.groups.join(sample)
        except IncompleteGroupError as error:
            return failed(error)
        return result
