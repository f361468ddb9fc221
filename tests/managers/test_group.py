import asyncio
import random

import pytest

from reward_loop import ConfigError, RewardAgent, RewardSample
from reward_loop.managers import GroupRewardLoopManager


def ranks(solution_strs):
    """The longest response is the best."""
    order = sorted(range(len(solution_strs)), key=lambda i: len(solution_strs[i]))
    return [order.index(i) for i in range(len(solution_strs))]


def manager(function=ranks, **group):
    options = {"group": {"timeout": 1000, **group}, "max_failed_share": 1}
    return GroupRewardLoopManager({"reward_loop": options}, compute_score=function)


def sample(text, group, **kwargs):
    return RewardSample(text, uid=f"{group}_{text}", group=group, **kwargs)


async def test_the_function_sees_the_whole_group():
    samples = [sample("x" * i, f"q{q}") for q in range(5) for i in range(4)]
    random.Random(7).shuffle(samples)
    made = manager(size=4)
    rewards = await asyncio.gather(*(made.run_single(one) for one in samples))
    assert [reward["reward_score"] for reward in rewards] == [len(one.solution_str) for one in samples]


async def test_members_that_never_come_fail_the_group():
    info = (await manager(size=2, timeout=0.05).run_single(sample("a", "q1")))["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
    assert "q1: only 1 of 2 samples arrived within 0.05 s (reward_loop.group.timeout): q1_a" in info["reward_error"]


@pytest.mark.parametrize(
    ("one", "message"), [(RewardSample("x"), "RewardSample.group"), (sample("x", "q"), "group.size")]
)
async def test_a_missing_group_or_size_is_an_error(one, message):
    with pytest.raises(ConfigError, match=message):
        await manager().run_single(one)


async def test_an_agent_needs_room_for_two_samples():
    async with RewardAgent(manager(), concurrency=1) as agent:
        with pytest.raises(ConfigError, match="concurrency must be at least 2, got 1"):
            agent.submit([RewardSample("x")] * 2, group_size=2)
