"""The manager `rate_limited`: verl's rate limits for a function that calls a service, shared by the whole job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from reward_loop.config import Config, LimitConfig, RewardLoopConfig, parse
from reward_loop.config.calls import MAX_COUNT
from reward_loop.errors import ConfigError
from reward_loop.limits.permit import DEFAULT
from reward_loop.managers.base import RewardLoopManagerBase, verl_options
from reward_loop.managers.registry import register

__all__ = ["RateLimitedConfig", "RateLimitedRewardLoopManager"]


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
        parsed = parse(RateLimitedConfig, given, "reward")
        limits = options.limits
        if DEFAULT not in limits:
            limits = {**limits, DEFAULT: _limit(parsed)}
        elif contradicting := sorted(given.keys() - {"timeout"}):
            raise ConfigError(f"reward.{contradicting[0]} contradicts reward_loop.limits.default: give one of them")
        return options.model_copy(update={"limits": limits, "timeout": parsed.timeout or options.timeout})


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
