"""The managers that call the function once for each sample: `naive` and `dapo`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from reward_loop.config import Config, parse
from reward_loop.errors import ConfigError
from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.registry import register
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
