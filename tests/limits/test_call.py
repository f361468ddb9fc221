from __future__ import annotations

import asyncio
import time

from reward_loop import RewardSample, RewardTimeoutError, ScoringFunction
from reward_loop.config import RewardLoopConfig
from reward_loop.limits.call import Call, Deadlines
from reward_loop.limits.local import LocalLimits


async def test_a_call_that_has_not_started_does_not_expire() -> None:
    loop = asyncio.get_running_loop()
    call = Call(LocalLimits(RewardLoopConfig()), timeout=0.0)
    Deadlines(loop).watch(call)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.future.done()
    call.begin()
    await asyncio.wait([call.future], timeout=30)
    assert isinstance(call.future.exception(), TimeoutError)


async def test_a_stall_before_the_function_starts_does_not_count_towards_its_deadline() -> None:
    async def compute_score(solution_str: str) -> float:
        return 1.0

    function = ScoringFunction(compute_score, timeout=0.05)
    scoring = asyncio.create_task(function(RewardSample("")))
    await asyncio.sleep(0)  # the call is watched; its function comes in the next turn
    time.sleep(0.1)  # noqa: ASYNC251 (the stall)
    assert function._deadlines is not None
    function._deadlines._look(0.05)  # the timer, due in the same turn
    assert (await scoring).score == 1.0


async def test_an_awaitable_of_a_sync_function_keeps_its_deadline_if_the_loop_is_busy() -> None:
    def compute_score(solution_str: str) -> object:
        return asyncio.sleep(3600)

    function = ScoringFunction(compute_score, timeout=0.2)
    scoring = asyncio.create_task(function(RewardSample("")))
    while function._deadlines is None or not any(function._deadlines._calls.values()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 (the function returns meanwhile, and its deadline passes)
    result = await asyncio.wait_for(scoring, 30)
    assert isinstance(result.exception, RewardTimeoutError)
