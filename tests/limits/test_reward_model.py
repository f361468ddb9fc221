"""The limit `reward_model`: calls that ask a served reward model wait for a place."""

import asyncio

import pytest

import reward_loop
from reward_loop import LimitError, NaiveRewardLoopManager, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.limits.local import REWARD_MODEL
from reward_loop.records import active_samples
from tests.support.clock import until, within

SAMPLE = RewardSample("4", uid="u7")
OPTIONS = RewardLoopConfig(limits={REWARD_MODEL: {"max_concurrent": 1, "max_wait": None}})


async def test_the_wait_has_a_name_and_holds_no_other_function_back():
    held = asyncio.Event()

    async def ask(reward_router_address):
        await held.wait()
        return 1.0

    manager = NaiveRewardLoopManager(OPTIONS, compute_score=ask)
    rule = ScoringFunction(lambda solution_str: 2.0, limits=manager.limits)
    tasks = [asyncio.create_task(manager.run_single(RewardSample("4", uid=str(i)))) for i in range(2)]
    assert (await within(rule(SAMPLE))).score == 2.0
    waits = {active.sample.uid: active.waits() for active in active_samples()}
    assert waits == {"0": [], "1": ["a free place at the reward model (limit 'reward_model')"]}
    held.set()
    assert [reward["reward_score"] for reward in await within(asyncio.gather(*tasks))] == [1.0, 1.0]


async def test_other_limits_hold_as_well_and_a_waiting_call_that_is_cancelled_holds_nothing():
    held = asyncio.Event()

    async def ask(reward_router_address):
        await held.wait()
        return 1.0

    limits = {"default": {"max_concurrent": 2}, REWARD_MODEL: {"max_concurrent": 1}}
    function = ScoringFunction(ask, options=RewardLoopConfig(limits=limits))
    tasks = [asyncio.create_task(function(SAMPLE)) for _ in range(3)]

    def in_flight():
        return {name: limit["in_flight"] for name, limit in function.limits.snapshot()["limits"].items()}

    await until(lambda: in_flight() == {"default": 2, REWARD_MODEL: 1})
    tasks[1].cancel()  # it has the limit `default`, and waits for a place
    await asyncio.wait([tasks[1]])
    await until(lambda: in_flight() == {"default": 2, REWARD_MODEL: 1})
    held.set()
    assert [result.score for result in await within(asyncio.gather(tasks[0], tasks[2]))] == [1.0, 1.0]
    assert in_flight() == {"default": 0, REWARD_MODEL: 0}


@pytest.mark.parametrize("name", ["default", REWARD_MODEL])
async def test_a_limit_of_the_whole_function_cannot_be_used_for_anything_else(name):
    async def inside(reward_router_address):
        async with reward_loop.limit("mine"):  # no limit of the user is configured: nothing to wait for
            pass
        async with reward_loop.limit(name):
            return 1.0

    result = await within(ScoringFunction(inside, options=OPTIONS)(SAMPLE))
    assert isinstance(result.exception.__cause__, LimitError)
    assert "already applies to the whole function" in result.error
