"""The managers with the names of verl's: `naive`, `remote`, `prime`, `rate_limited`, `dapo` and `gdpo`.

Each calls the function once for each sample. They differ in where it runs, under which limits, and what happens to its
score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from reward_loop._util.text import listing, shorten
from reward_loop.config import Config, parse
from reward_loop.errors import ConfigError, InvalidScoreError
from reward_loop.limits.options import MAX_COUNT, LimitConfig
from reward_loop.limits.permit import DEFAULT
from reward_loop.managers.base import RewardLoopManagerBase, verl_options
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.managers.registry import register
from reward_loop.scoring.results import failed_after, is_finite
from reward_loop.types import Reward, RewardResult, RewardSample, finite_number

_PRIME_PROCESSES = 64
"""The number of processes that verl's ``prime`` starts."""


@register("naive")
class NaiveRewardLoopManager(RewardLoopManagerBase):
    """Calls the function once for each sample."""


@register("remote")
class RemoteRewardLoopManager(NaiveRewardLoopManager):
    """Calls a sync function in worker processes, which are killed at the deadline. ``isolation`` is ignored.

    The number of processes is ``max_processes``, by default verl's ``reward.num_workers``. verl's manager of the same
    name uses Ray actors without a deadline instead.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            processes = self.options.max_processes or verl_options(config, "reward.num_workers")
            self.function.isolate(processes, self.options.max_memory_mb)


@register("prime")
class PrimeRewardLoopManager(NaiveRewardLoopManager):
    """Calls the function in worker processes, and kills calls past their deadline.

    By default 64 processes are divided among verl's ``reward.num_workers``; ``max_processes`` sets the number for this
    manager. A call is killed after ``timeout`` seconds (by default 300, as in verl's ``prime``).

    If the function times out or raises, verl's ``prime`` gives the sample the reward 0. Here the sample is *failed*;
    under the policy ``mask`` its reward is also 0.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            share = max(1, _PRIME_PROCESSES // (verl_options(config, "reward.num_workers") or 1))
            self.function.isolate(self.options.max_processes or share, self.options.max_memory_mb)


class RateLimitedConfig(Config):
    """verl's options for its manager ``rate_limited``, in the group ``reward``."""

    max_concurrent: int = Field(default=1, ge=1, le=MAX_COUNT)
    """The maximum number of calls in flight."""

    max_rpm: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The maximum number of calls started per minute."""

    max_tpm: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The maximum number of tokens per minute, of the calls started in it."""

    estimated_tokens_per_request: int = Field(default=2000, ge=1, le=MAX_COUNT)
    """The estimated tokens of a call, used until `reward_loop.client` or ``lease.used`` reports the actual number."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds from the start of the function to its deadline; by default ``reward_loop.timeout``."""


@register("limited")
@register("rate_limited")
class RateLimitedRewardLoopManager(RewardLoopManagerBase):
    """Calls the function once for each sample, under the limits of verl's manager of the same name.

    The limits become ``reward_loop.limits.default``, which all workers share. In verl they apply to each worker.
    """

    @classmethod
    def read_options(cls, config: RewardLoopConfig | Mapping[str, Any] | None) -> RewardLoopConfig:
        """Return the options, with verl's limits as the limit ``default``.

        Raises:
            ConfigError: an option is invalid, or both verl's limits and ``reward_loop.limits.default`` are set.
        """
        options = super().read_options(config)
        given = {
            name: value
            for name in RateLimitedConfig.model_fields
            if (value := verl_options(config, f"reward.{name}")) is not None
        }
        own = parse(RateLimitedConfig, given, "reward")
        update: dict[str, Any] = {} if own.timeout is None else {"timeout": own.timeout}
        if DEFAULT not in options.limits:
            update["limits"] = {**options.limits, DEFAULT: _limit(own)}
        elif limits := sorted(given.keys() - {"timeout"}):
            raise ConfigError(f"reward.{limits[0]} contradicts reward_loop.limits.default: give one of them")
        return options.model_copy(update=update)


def _limit(given: RateLimitedConfig) -> LimitConfig:
    if given.max_tpm is not None and given.estimated_tokens_per_request > given.max_tpm:
        raise ConfigError(
            f"reward.estimated_tokens_per_request={given.estimated_tokens_per_request} is more than "
            f"reward.max_tpm={given.max_tpm}: no call could ever start"
        )
    return LimitConfig(
        max_concurrent=given.max_concurrent,
        requests_per_minute=given.max_rpm,
        tokens_per_minute=given.max_tpm,
        estimated_tokens_per_request=given.estimated_tokens_per_request,
    )


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
        given = verl_options(self.config, where) or {}
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


@register("gdpo")
class GDPORewardLoopManager(RewardLoopManagerBase):
    """Ensures that each sample has all rewards in ``algorithm.gdpo_reward_keys``, which GDPO normalises separately.

    The function returns a dict with ``score`` and these keys. It also receives ``extra_info["experiment_name"]``, as in
    verl's manager of the same name. GDPO: https://arxiv.org/abs/2601.05242.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reward_keys: list[str] = list(verl_options(self.config, "algorithm.gdpo_reward_keys") or ())

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in ``data``, with the experiment's name in its extra info."""
        sample = await super().to_sample(data)
        name = verl_options(self.config, "trainer.experiment_name")
        return replace(sample, extra_info={**sample.extra_info, "experiment_name": name})

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Score the sample. It fails if one of the rewards is missing or not a finite number."""
        result = await super().score_one(sample)
        if result.score is None:
            return result
        wrong = [key for key in self.reward_keys if not _is_number(result.extra_info.get(key))]
        if not wrong:
            return result
        problem = (
            f"must return a dict with a number for each of algorithm.gdpo_reward_keys; "
            f"{listing(wrong)} is missing or not a number, in {shorten(dict(result.extra_info))}"
        )
        return failed_after(result, InvalidScoreError(problem, sample=sample, function=self.function.name))

    def to_reward(self, result: RewardResult) -> Reward:
        """Return the reward. If the policy ``default`` applies, all rewards of the sample are the default score.

        A masked sample gets no such rewards, because they would count in the means.
        """
        reward = super().to_reward(result)
        if result.score is None and not result.masked:
            reward["reward_extra_info"].update(dict.fromkeys(self.reward_keys, result.reward))
        return reward


def _is_number(value: Any) -> bool:
    number = finite_number(value)
    return number is not None and is_finite(number)
