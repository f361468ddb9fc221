"""The managers: `naive` and `dapo` call the function once for each sample, `batch` and `group` once for several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from reward_loop.config import Config, parse
from reward_loop.errors import ConfigError, IncompleteGroupError
from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.groups import Batcher
from reward_loop.managers.registry import register
from reward_loop.scoring import ListScoringFunction
from reward_loop.scoring.results import failed
from reward_loop.types import RewardResult, RewardSample


@register("naive")
class NaiveRewardLoopManager(RewardLoopManagerBase):
    """Calls the function once for each sample."""


class OverlongBufferConfig(Config):
    """verl's option group ``overlong_buffer_cfg``."""

    enable: bool = False
    """Whether to apply the penalty."""

    len: int = Field(default=0, ge=0)
    """The number of tokens before ``max_resp_len`` at which the penalty starts."""

    penalty_factor: float = 0.0
    """The penalty, as a positive number, of a response of ``max_resp_len`` tokens."""

    log: bool = False
    """Whether to add ``overlong_reward`` and ``overlong`` to the extra info."""


@register("dapo")
class DAPORewardLoopManager(RewardLoopManagerBase):
    """Adds the overlong penalty of DAPO (https://arxiv.org/abs/2503.14476, section 3.4) to a sample's score.

    Options, as in verl's manager of the same name: ``reward.reward_kwargs.overlong_buffer_cfg`` and
    ``reward.reward_kwargs.max_resp_len``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        where = "reward.reward_kwargs"
        given = self.converter.option(where) or {}
        self.max_resp_len: int = given.get("max_resp_len") or 0
        self.overlong_buffer = parse(
            OverlongBufferConfig, given.get("overlong_buffer_cfg"), f"{where}.overlong_buffer_cfg"
        )
        if not self.overlong_buffer.enable:
            return
        if self.overlong_buffer.len < 1:
            raise ConfigError(f"{where}.overlong_buffer_cfg.len: at least 1; to have no penalty, set enable=False")
        if self.max_resp_len < self.overlong_buffer.len:
            raise ConfigError(
                f"{where}.max_resp_len: the longest response in tokens, at least overlong_buffer_cfg.len "
                f"({self.overlong_buffer.len}); got {given.get('max_resp_len')}"
            )

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Score the sample and add the penalty, a number of 0 or less, unless the sample has no score.

        Raises:
            ConfigError: the sample has no response length.
        """
        result = await super().score_one(sample)
        buffer = self.overlong_buffer
        if not buffer.enable or result.score is None:
            return result
        if sample.response_length is None:
            raise ConfigError("the manager `dapo` needs the length of each response: set RewardSample.response_length")
        penalty = overlong_penalty(sample.response_length, self.max_resp_len, buffer.len, buffer.penalty_factor)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if buffer.log else {}
        return replace(result, score=result.score + penalty, extra_info={**result.extra_info, **logged})


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return the penalty (0 or less) of a response of ``length`` tokens.

    The penalty is 0 up to ``max_length - buffer`` tokens, and decreases linearly from there: it is ``-factor`` at
    ``max_length``, and lower beyond.
    """
    # No lower bound at `-factor`, unlike in the paper: verl has none either.
    return min(-(length - (max_length - buffer)) / buffer * factor, 0.0)


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
    they are scored are not awaited. If the caller does not report them, as in verl's own reward loop, all samples of a
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
