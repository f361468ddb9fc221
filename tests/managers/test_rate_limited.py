import asyncio

import pytest

from reward_loop import ConfigError, RewardSample
from reward_loop.config import LimitConfig
from reward_loop.managers import NaiveRewardLoopManager, RateLimitedRewardLoopManager, get
from tests.counting import Counting


def manager(function=lambda: 1.0, reward_loop=None, limits=None, **reward):
    config = {"reward": reward, "reward_loop": reward_loop}
    return RateLimitedRewardLoopManager(config, compute_score=function, limits=limits)


def test_the_manager_has_both_of_verls_names():
    assert get("rate_limited") is get("limited") is RateLimitedRewardLoopManager


def test_verls_options_become_limits_of_the_job():
    made = manager(max_concurrent=10, max_rpm=500, max_tpm=100_000, estimated_tokens_per_request=1500, timeout=60.0)
    assert made.options.limits["default"] == LimitConfig(
        max_concurrent=10,
        requests_per_minute=500,
        tokens_per_minute=100_000,
        estimated_tokens_per_request=1500,
    )
    assert made.options.timeout == made.function.timeout == 60


def test_defaults_are_verls():
    made = manager()
    assert made.options.limits["default"] == LimitConfig(max_concurrent=1, estimated_tokens_per_request=2000)
    assert made.options.timeout == 300
    assert manager(reward_loop={"timeout": 5}).options.timeout == 5


def test_other_limits_and_ones_own_stay():
    limits = {"default": {"max_concurrent": 7}, "judge": {"requests_per_minute": 3}}
    made = manager(reward_loop={"limits": limits}, timeout=9.0)
    assert made.options.limits["default"].max_concurrent == 7
    assert made.options.limits["judge"].requests_per_minute == 3
    assert made.options.timeout == 9


@pytest.mark.parametrize(
    ("reward", "reward_loop", "message"),
    [
        ({"max_rpm": 0}, None, r"reward\.max_rpm"),
        ({"max_rpm": 5}, {"limits": {"default": {}}}, r"reward\.max_rpm contradicts reward_loop\.limits\.default"),
        ({"max_tpm": 1000}, None, r"estimated_tokens_per_request=2000 is more than reward\.max_tpm=1000"),
    ],
)
def test_wrong_options_are_named(reward, reward_loop, message):
    with pytest.raises(ConfigError, match=message):
        manager(reward_loop=reward_loop, **reward)


async def test_managers_that_share_limits_keep_one_limit():
    judge = Counting()
    first = manager(judge, max_concurrent=2)
    managers = [first, *(manager(judge, max_concurrent=2, limits=first.limits) for _ in range(3))]
    rewards = await asyncio.gather(*(made.run_single(RewardSample("x")) for made in managers for _ in range(10)))
    assert {reward["reward_score"] for reward in rewards} == {1.0}
    assert judge.peak == 2


async def test_a_failure_has_a_score_only_under_the_policy_default():
    def broken():
        raise ConnectionError("no route")

    info = (await manager(broken).run_single(RewardSample("x")))["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
    as_verl = await manager(broken, {"on_failed": "default"}).run_single(RewardSample("x"))
    assert (as_verl["reward_score"], as_verl["reward_extra_info"]["reward_masked"]) == (0.0, False)


def test_other_managers_read_none_of_it():
    made = NaiveRewardLoopManager({"reward": {"max_rpm": 5}}, compute_score=lambda: 1.0)
    assert made.options.limits == {}
