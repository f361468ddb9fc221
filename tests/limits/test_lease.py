"""`limit` in functions on the event loop, in threads and in worker processes."""

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import reward_loop
from reward_loop import (
    BudgetSpentError,
    LimitError,
    NaiveRewardLoopManager,
    Outcome,
    RewardLoopConfig,
    RewardSample,
    RewardTimeoutError,
    ScoringFunction,
)
from reward_loop.limits.local import REWARD_MODEL
from tests.support.clock import advance, until

SAMPLE = RewardSample("4", uid="u7")


def scoring(function, **options):
    config = RewardLoopConfig(**{"retry": {"max_attempts": 1}, **options})
    scored = ScoringFunction(function, options=config)
    return scored, scored.limits


async def score(function, count=1):
    try:
        return await asyncio.gather(*(function(SAMPLE) for _ in range(count)))
    finally:
        await asyncio.to_thread(function.close)


def status(limits, name="judge"):
    return limits.snapshot()["limits"][name]


async def plain_async():
    return 1


def plain():
    return 1


async def asks_async(reward_router_address):
    return 1


async def holds_async():
    async with reward_loop.limit("judge", tokens=10) as lease:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        ended = time.monotonic()
        lease.add(tokens=5)
        lease.used(cost=0.5)
    return {"score": 1, "began": began, "ended": ended}


def holds_in_a_loop():
    return asyncio.run(holds_async())


def holds():
    with reward_loop.limit("judge", tokens=10) as lease:
        began = time.monotonic()
        time.sleep(0.02)
        ended = time.monotonic()
        lease.used(tokens=5, cost=0.5)
    return {"score": 1, "began": began, "ended": ended}


EVERYWHERE = pytest.mark.parametrize("function", [holds_async, holds_in_a_loop, holds])


@EVERYWHERE
async def test_functions_keep_a_limit_and_report_their_usage(function):
    function, limits = scoring(function, limits={"judge": {"max_concurrent": 2}})
    results = await score(function, 12)
    assert [result.error for result in results] == [None] * 12
    spans = [(result.extra_info["began"], result.extra_info["ended"]) for result in results]
    assert max(sum(began <= at < ended for began, ended in spans) for at, _ in spans) <= 2
    assert (limits.tokens, limits.cost) == (60, 6)
    await until(lambda: status(limits)["in_flight"] == 0)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain_async, "default"),
        (plain, "default"),
        (holds_async, "judge"),
        (holds, "judge"),
        (asks_async, REWARD_MODEL),
    ],
)
async def test_waiting_for_a_limit_does_not_count_towards_the_deadline(function, name):
    timeout = 600.0
    function, limits = scoring(function, limits={name: {"max_concurrent": 1}}, timeout=timeout)
    permit = await limits.acquire(name)
    calls = [asyncio.create_task(function(SAMPLE)) for _ in range(3)]
    await until(lambda: status(limits, name)["waiting"] == 3)
    await advance(1.1 * timeout)
    permit.leave()
    for result in await asyncio.gather(*calls):
        assert (result.error, result.score) == (None, 1)
        assert result.wait_s > timeout
        assert result.work_s < timeout
    await asyncio.to_thread(function.close)


class Refused(Exception):
    status = 429


async def raises():
    raise Refused


async def raises_within_async():
    async with reward_loop.limit("judge"):
        raise Refused


def raises_within():
    with reward_loop.limit("judge"):
        raise Refused


def reports():
    with reward_loop.limit("judge") as lease:
        lease.refused()
    return 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (raises, "default"),
        (raises_within_async, "judge"),
        (raises_within, "judge"),
        (reports, "judge"),
    ],
)
async def test_refusals_shrink_an_adaptive_limit(function, name):
    function, limits = scoring(function, limits={name: {"adaptive": True}})
    assert status(limits, name)["max_in_flight"] == 20
    await score(function, 3)
    await until(lambda: status(limits, name)["max_in_flight"] == 16)


@EVERYWHERE
async def test_an_unknown_limit_is_an_error_unless_there_are_no_limits(function):
    limited, _ = scoring(function, limits={"juge": {"max_concurrent": 1}})
    (result,) = await score(limited)
    assert "unknown limit 'judge'; did you mean 'juge'" in result.error
    unlimited, _ = scoring(function)
    assert (await score(unlimited))[0].score == 1


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.int64(5), None),
        (math.nan, "got nan"),
        (10**400, "got 1000"),
        (-1, "got -1"),
        ("many", "got 'many'"),
    ],
)
async def test_used_tokens_and_cost_must_be_numbers(tokens, error):
    async def judge():
        async with reward_loop.limit("judge") as lease:
            lease.used(tokens=tokens, cost=tokens)
        return 1

    function, limits = scoring(judge, limits={"judge": {"tokens_per_minute": 100}})
    result = await function(SAMPLE)
    assert (result.error is None) == (error is None)
    if error:
        assert f"tokens must be a finite number, 0 or more; {error}" in result.error
    assert limits.tokens == (0 if error else float(tokens))


async def test_a_retry_keeps_its_place():
    """Steps of four samples at a limit of two: without it, the retries of a step wait behind all of the next one."""
    ends = []

    async def judge(solution_str):
        await asyncio.sleep(0.01)
        if not any(name == solution_str for name in tried):
            tried.append(solution_str)
            raise reward_loop.TransientError("again")
        ends.append(solution_str)
        return 1

    tried = ["2"] * 40
    limits = {"default": {"max_concurrent": 2}}
    function, _ = scoring(judge, limits=limits, retry={"initial_wait": 0.001})
    await asyncio.gather(*(function(RewardSample(name, step=int(name))) for name in "1111" + "2" * 40))
    assert max(index for index, name in enumerate(ends) if name == "1") < 10


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_call_past_its_deadline_releases_its_permit(is_async):
    entered, release = threading.Event(), threading.Event()

    async def judge(solution_str):
        async with reward_loop.limit("judge"):
            if solution_str == "hang":
                entered.set()
                try:
                    await asyncio.Event().wait()
                except BaseException:
                    await asyncio.Event().wait()
        return 1

    def sync_judge(solution_str):
        with reward_loop.limit("judge"):
            if solution_str == "hang":
                entered.set()
                release.wait()
        return 1

    limits = {"judge": {"max_concurrent": 1}, "default": {"max_concurrent": 1}}
    function, limits = scoring(judge if is_async else sync_judge, limits=limits, timeout=600)
    hanging = asyncio.create_task(function(RewardSample("hang")))
    await until(entered.is_set)
    assert status(limits)["in_flight"] == 1
    await advance(601)
    assert (await function(RewardSample("4"))).score == 1
    release.set()
    assert isinstance((await hanging).exception, RewardTimeoutError)


@pytest.mark.parametrize("comes_late", [False, True])
async def test_the_thread_of_a_cancelled_call_gets_no_permit(comes_late):
    came, go_on, over = threading.Event(), threading.Event(), threading.Event()
    refused = []

    def judge():
        came.set()
        go_on.wait()
        try:
            with reward_loop.limit("judge"):
                refused.append("a permit was granted")
        except LimitError as error:
            refused.append(str(error))
        over.set()

    function, limits = scoring(judge, limits={"judge": {"max_concurrent": 1}})
    permit = await limits.acquire("judge")
    call = asyncio.create_task(function(SAMPLE))
    await until(came.is_set)
    if not comes_late:
        go_on.set()
        await until(lambda: status(limits)["waiting"])
    call.cancel()
    await asyncio.wait([call])
    go_on.set()
    await until(over.is_set)
    assert "no permit was granted" in refused[0]
    assert status(limits)["waiting"] == 0
    permit.leave()


async def test_a_function_can_be_called_directly():
    assert (await holds_async())["score"] == 1
    with pytest.raises(RuntimeError, match="async with"), reward_loop.limit("judge"):
        pass


@pytest.mark.parametrize(("at_cap", "score"), [("stop", None), ("default", -1.0), ("mask", 0.0)])
async def test_a_budget_that_is_used_up(at_cap, score):
    async def within():
        async with reward_loop.limit("judge") as lease:
            lease.used(tokens=60)
        return 1.0

    given = {"budget": {"max_tokens": 100, "at_cap": at_cap}, "default_score": -1.0}
    config = RewardLoopConfig(**given)
    first = NaiveRewardLoopManager(config, compute_score=within)
    second = NaiveRewardLoopManager(config, compute_score=within, limits=first.limits)
    for manager in (first, second):
        assert (await manager.run_single(SAMPLE))["reward_score"] == 1.0
    for manager in (first, second):
        message = "was not called: the run's budget is used up: 120 of reward_loop.budget.max_tokens=100"
        if at_cap == "stop":
            with pytest.raises(BudgetSpentError, match=f"sample u7: .* {message}. Raise it, or set"):
                await manager.run_single(SAMPLE)
        else:
            reward = await manager.run_single(SAMPLE)
            info = reward["reward_extra_info"]
            assert reward["reward_score"] == score
            assert (info["reward_outcome"], info["reward_masked"]) == ("unscored", at_cap == "mask")
            assert message in info["reward_error"]
        manager.close()
    alone = NaiveRewardLoopManager(RewardLoopConfig(**given), compute_score=within)  # with limits of its own
    assert (await alone.run_single(SAMPLE))["reward_score"] == 1.0


async def spends_async():
    try:
        async with reward_loop.limit("judge") as lease:
            lease.used(cost=1)
            await asyncio.sleep(0)
    except BudgetSpentError as error:
        raise ValueError("no judge") from error
    return 1


def spends_sync():
    with reward_loop.limit("judge") as lease:
        lease.used(cost=1)
    return 1


@pytest.mark.parametrize("function", [spends_async, spends_sync])
async def test_samples_that_wait_for_a_permit_are_left_out_when_the_budget_is_used_up(function):
    given = {"limits": {"judge": {"max_concurrent": 2}}, "budget": {"max_cost": 3, "at_cap": "mask"}}
    scored, _ = scoring(function, **given)
    results = await score(scored, 20)
    outcomes = [result.outcome for result in results]
    assert 3 <= outcomes.count(Outcome.SCORED) <= 4  # two calls are in flight at a time
    assert outcomes.count(Outcome.UNSCORED) == 20 - outcomes.count(Outcome.SCORED)
    left_out = [result for result in results if result.outcome is Outcome.UNSCORED]
    assert {type(result.exception) for result in left_out} == {BudgetSpentError}
    assert all("budget is used up: 3 of reward_loop.budget.max_cost=3" in result.error for result in left_out)


async def test_a_sample_is_not_called_again_once_the_budget_is_used_up():
    async def judge():
        async with reward_loop.limit("judge") as lease:
            lease.used(cost=1)
        raise reward_loop.TransientError("down")

    function, _ = scoring(judge, budget={"max_cost": 1}, retry={"max_attempts": 3, "initial_wait": 0.001})
    result = await function(SAMPLE)
    assert (result.outcome, result.attempts) == (Outcome.UNSCORED, 1)
    assert "was not called again: the run's budget is used up" in result.error


async def test_further_requests_of_a_call_are_refused_once_the_budget_is_used_up():
    async def judge():
        for _ in range(2):
            async with reward_loop.limit("judge") as lease:
                lease.used(cost=1)
        return 1

    function, limits = scoring(judge, budget={"max_cost": 1})  # without configured limits, too
    result = await function(SAMPLE)
    assert (result.outcome, limits.cost) == (Outcome.UNSCORED, 1)
    assert "got no permit: the run's budget is used up" in result.error


@pytest.mark.processes
def test_a_process_that_the_function_forks_is_outside():
    # In a process of its own: those of the tests have threads that a fork had better not meet.
    code = """
import asyncio, os, signal
import reward_loop

def judge():
    if (pid := os.fork()) == 0:
        signal.alarm(200)
        with reward_loop.limit("judge"):
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

options = reward_loop.RewardLoopConfig(limits={"judge": {"max_concurrent": 1}})
function = reward_loop.ScoringFunction(judge, options=options)
print(asyncio.run(function(reward_loop.RewardSample(""))).score)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "7.0\n", done.stderr
