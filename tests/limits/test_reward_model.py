"""The limit `reward_model`: calls that ask a served reward model wait for a place before their deadlines start."""

import asyncio

import pytest

import reward_loop
from reward_loop import LimitError, NaiveRewardLoopManager, RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.limits.local import REWARD_MODEL
from reward_loop.records import active_samples
from tests.support.clock import until

SAMPLE = RewardSample("4", uid="u7")


async def within(awaitable, seconds=30):
    return await asyncio.wait_for(awaitable, seconds)


class Judge:
    """Answers one request after the other; each takes `seconds`."""

    def __init__(self, seconds):
        self.seconds, self.most, self.now = seconds, 0, 0
        self._turn = asyncio.Lock()

    async def ask(self):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async with self._turn:
                await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1


def options(places, **more):
    return RewardLoopConfig(limits={REWARD_MODEL: {"max_concurrent": places, "max_wait": None}}, **more)


@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_the_deadline_starts_with_the_place(where):
    judge = Judge(0.04)
    loop = asyncio.get_running_loop()

    async def ask(reward_router_address):
        await judge.ask()
        return 1.0

    def ask_in_thread(reward_router_address):
        asyncio.run_coroutine_threadsafe(judge.ask(), loop).result()
        return 1.0

    given = options(2, timeout=1, retry={"max_attempts": 1})
    function = ScoringFunction(ask if where == "loop" else ask_in_thread, options=given)
    results = await within(asyncio.gather(*(function(SAMPLE) for _ in range(60))))
    await asyncio.to_thread(function.close)
    assert [result.outcome for result in results] == ["scored"] * 60
    assert judge.most == 2
    # 60 calls of 0.04 s, one after the other, are more than two deadlines; each call took two turns of the judge.
    assert max(result.wait_s for result in results) > 2
    assert max(result.work_s for result in results) < 1


async def test_the_wait_has_a_name_and_holds_no_other_function_back():
    held = asyncio.Event()

    async def ask(reward_router_address):
        await held.wait()
        return 1.0

    manager = NaiveRewardLoopManager(options(1), compute_score=ask)
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


async def test_the_limit_cannot_be_used_for_anything_else():
    async def inside(reward_router_address):
        async with reward_loop.limit("mine"):  # no limit of the user is configured: nothing to wait for
            pass
        async with reward_loop.limit(REWARD_MODEL):
            return 1.0

    result = await within(ScoringFunction(inside, options=options(1))(SAMPLE))
    assert isinstance(result.exception.__cause__, LimitError)
    assert "applies to the whole function" in result.error
