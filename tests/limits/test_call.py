from __future__ import annotations

import asyncio
import functools
import time

import pytest

from reward_loop import RewardSample, RewardTimeoutError, ScoringFunction
from reward_loop.config import RewardLoopConfig
from reward_loop.limits.call import Call, Deadlines
from reward_loop.limits.local import LocalLimits
from tests.support.clock import advance


async def test_only_work_after_the_start_counts_towards_the_deadline() -> None:
    call = Call(LocalLimits(RewardLoopConfig()), timeout=10.0)
    call.watch()
    await advance(100)
    assert not call.future.done()  # it waits for a thread
    call.begin()
    await advance(6)
    with call.waiting("a limit"):
        await advance(100)
    await advance(3)
    assert not call.future.done()
    await advance(2)
    with pytest.raises(TimeoutError):
        call.future.result()


async def test_each_call_of_a_function_has_its_own_deadline() -> None:
    deadlines, limits, calls = Deadlines(10.0), LocalLimits(RewardLoopConfig()), []
    for _ in range(3):
        calls.append(Call(limits, timeout=10.0))
        deadlines.add(calls[-1])
        calls[-1].begin()
        await advance(4)
    deadlines.discard(calls[1])
    await advance(5)
    assert [call.future.done() for call in calls] == [True, False, False]
    await advance(2)
    assert [call.future.done() for call in calls] == [True, False, True]


@pytest.mark.parametrize("timeout", [None, 300, 0.2])
async def test_deadlines_hold_on_two_event_loops_at_once_and_may_change(timeout: float | None) -> None:
    function = ScoringFunction(functools.partial(asyncio.sleep, 3600), timeout=timeout)
    function.timeout = 0.2
    other = asyncio.to_thread(lambda: asyncio.run(function(RewardSample(""))))  # type: ignore[arg-type]
    for result in await asyncio.wait_for(asyncio.gather(function(RewardSample("")), other), 30):
        assert isinstance(result.exception, RewardTimeoutError)


async def test_a_stall_before_the_function_starts_does_not_count_towards_its_deadline() -> None:
    async def compute_score(solution_str: str) -> float:
        return 1.0

    function = ScoringFunction(compute_score, timeout=0.05)
    scoring = asyncio.create_task(function(RewardSample("")))
    await asyncio.sleep(0)  # the call is watched; its function comes in the next turn
    time.sleep(0.1)  # noqa: ASYNC251 (the stall)
    assert (await scoring).score == 1.0


async def test_an_awaitable_of_a_sync_function_keeps_its_deadline_if_the_loop_is_busy() -> None:
    started = asyncio.get_running_loop().create_future()

    def compute_score(solution_str: str) -> object:
        started.get_loop().call_soon_threadsafe(started.set_result, None)
        return asyncio.sleep(3600)

    function = ScoringFunction(compute_score, timeout=0.2)
    scoring = asyncio.create_task(function(RewardSample("")))
    await started
    time.sleep(0.5)  # noqa: ASYNC251 (the function returns meanwhile, and its deadline passes)
    result = await asyncio.wait_for(scoring, 30)
    assert isinstance(result.exception, RewardTimeoutError)
