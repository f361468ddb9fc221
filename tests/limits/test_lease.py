import asyncio
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import reward_loop
from reward_loop import (
    JobServiceError,
    LimitError,
    Outcome,
    RewardLoopConfig,
    RewardSample,
    RewardTimeoutError,
    ScoringFunction,
)
from reward_loop.limits.limiter import WINDOW
from reward_loop.limits.server import LimitServer
from tests.clock import advance
from tests.counting import Counting

SAMPLE = RewardSample("4", uid="u7")


class Refused(Exception):
    status = 429


def scoring(function, **options):
    config = RewardLoopConfig(**{"retry": {"max_attempts": 1}, **options})
    scored = ScoringFunction(function, options=config)
    return scored, scored.limits


async def test_the_default_limit_holds_for_every_call():
    judge = Counting()
    function, _ = scoring(judge, limits={"default": {"max_concurrent": 3}})
    results = await asyncio.gather(*(function(SAMPLE) for _ in range(50)))
    assert judge.peak == 3
    assert {result.outcome for result in results} == {Outcome.SCORED}
    assert any(result.wait_seconds > 0 for result in results)


async def test_a_call_without_an_estimate_counts_with_that_of_the_limit():
    counted = []

    async def judge():
        async with reward_loop.limit("judge"):
            counted.append(kept.snapshot()["limits"]["judge"]["tokens_last_minute"])
        async with reward_loop.limit("judge", tokens=10):
            counted.append(kept.snapshot()["limits"]["judge"]["tokens_last_minute"])
        return 1

    limit = {"tokens_per_minute": 100, "estimated_tokens_per_request": 60, "burst_seconds": 60}
    function, kept = scoring(judge, limits={"judge": limit})
    await function(SAMPLE)
    assert counted == [60, 70]


async def test_a_limit_inside_an_async_function():
    running = peak = 0

    async def judge():
        nonlocal running, peak
        async with reward_loop.limit("judge", tokens=10) as lease:
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0)
            running -= 1
            lease.used(tokens=5, cost=0.5)
        return 1

    function, kept = scoring(judge, limits={"judge": {"max_concurrent": 2}})
    results = await asyncio.gather(*(function(SAMPLE) for _ in range(20)))
    assert peak == 2
    assert {result.outcome for result in results} == {Outcome.SCORED}
    assert (kept.tokens, kept.cost) == (100, 10)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (np.int64(5), None),
        (math.nan, "got nan"),
        (10**400, "got 1000"),
        (-1, "got -1"),
        ("many", "got 'many'"),
        (True, None),
    ],
)
async def test_used_tokens_and_cost_must_be_numbers(tokens, error):
    async def judge():
        async with reward_loop.limit("judge") as lease:
            lease.used(tokens=tokens, cost=tokens)
        return 1

    service = LimitServer(RewardLoopConfig(limits={"judge": {"tokens_per_minute": 100}}))
    function, kept = scoring(judge, limits={"judge": {"tokens_per_minute": 100}}, job=await service.start())
    result = await function(SAMPLE)
    assert (result.error is None) == (error is None)
    if error:
        assert f"tokens must be a finite number, 0 or more; {error}" in result.error
    assert (await kept.status())["tokens"] == (0 if error else float(tokens))
    kept.close()
    await service.stop()


async def test_a_limit_inside_a_sync_function():
    running = peak = 0
    lock, both = threading.Lock(), threading.Barrier(2)

    def judge():
        nonlocal running, peak
        with reward_loop.limit("judge") as lease:
            with lock:
                running += 1
                peak = max(peak, running)
            both.wait(60)
            with lock:
                running -= 1
            lease.used(cost=1)
        return 1

    function, kept = scoring(judge, limits={"judge": {"max_concurrent": 2}})
    results = await asyncio.gather(*(function(SAMPLE) for _ in range(20)))
    assert peak == 2
    assert {result.outcome for result in results} == {Outcome.SCORED}
    assert kept.cost == 20


@pytest.mark.parametrize("name", ["default", "judge"])
@pytest.mark.parametrize("remote", [False, True])
async def test_validation_and_training_take_turns(name, remote):
    order = []

    async def judge(solution_str):
        if name == "default":
            order.append(solution_str)
            return 1
        async with reward_loop.limit(name):
            order.append(solution_str)
            return 1

    limits = {name: {"max_concurrent": 1}}
    service = LimitServer(RewardLoopConfig(limits=limits))
    address = await service.start()
    config = RewardLoopConfig(limits=limits, job=address if remote else None)
    manager = reward_loop.NaiveRewardLoopManager(config, compute_score=judge)
    job = manager.limits
    place = await job.acquire(name, 0, "train")
    # All of training has come first, and validation is still served every second time.
    samples = [RewardSample(f"train {i}") for i in range(6)] + [RewardSample(f"val {i}", validate=True) for i in (0, 1)]
    calls = [asyncio.create_task(manager.run_single(sample)) for sample in samples]
    async with asyncio.timeout(60):
        while True:
            status = await job.status()
            if status["limits"][name]["waiting"] == len(samples):
                break
            await asyncio.sleep(0.001)
    place.leave()
    await asyncio.gather(*calls)
    assert order == ["train 0", "val 0", "train 1", "val 1", "train 2", "train 3", "train 4", "train 5"]
    if remote:
        job.close()
    await service.stop()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("inside", [True, False])
async def test_waiting_for_a_limit_does_not_eat_the_deadline(is_async, inside):
    # All wait until the place is given back, after more than their deadline.
    timeout = 600.0

    async def judge():
        if inside:
            async with reward_loop.limit("judge"):
                await asyncio.sleep(0)
        return 1

    def sync_judge():
        if inside:
            with reward_loop.limit("judge"):
                pass
        return 1

    name = "judge" if inside else "default"
    function, kept = scoring(judge if is_async else sync_judge, limits={name: {"max_concurrent": 1}}, timeout=timeout)
    place = await kept.acquire(name, 0, "train")
    calls = [asyncio.create_task(function(SAMPLE)) for _ in range(4)]
    async with asyncio.timeout(60):
        while kept.snapshot()["limits"][name]["waiting"] < len(calls):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await advance(1.1 * timeout)
    place.leave()
    for result in await asyncio.gather(*calls):
        assert (result.error, result.score) == (None, 1)
        assert result.wait_seconds > timeout
        assert result.seconds < timeout


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_call_past_its_deadline_gives_back_its_place(is_async):
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
    function, kept = scoring(judge if is_async else sync_judge, limits=limits, timeout=600)
    hanging = asyncio.create_task(function(RewardSample("hang")))
    async with asyncio.timeout(60):
        while not entered.is_set():  # noqa: ASYNC110 (a thread may set it)
            await asyncio.sleep(0.001)
    assert kept.snapshot()["limits"]["judge"]["in_flight"] == 1
    await advance(601)
    assert (await function(RewardSample("4"))).score == 1
    release.set()
    assert isinstance((await hanging).exception, RewardTimeoutError)


@pytest.mark.parametrize("comes_late", [False, True])
async def test_a_thread_whose_call_is_given_up_gets_no_place(comes_late):
    came, go_on, over = threading.Event(), threading.Event(), threading.Event()
    refused = []

    def judge():
        came.set()
        go_on.wait()
        try:
            with reward_loop.limit("judge"):
                refused.append("it was let in")
        except LimitError as error:
            refused.append(str(error))
        over.set()

    function, kept = scoring(judge, limits={"judge": {"max_concurrent": 1}})

    def waiting():
        return kept.snapshot()["limits"]["judge"]["waiting"]

    place = await kept.acquire("judge", 0, "train")
    call = asyncio.create_task(function(SAMPLE))
    assert await asyncio.to_thread(came.wait, 60)
    if not comes_late:
        go_on.set()
        async with asyncio.timeout(60):
            while not waiting():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.wait([call])
    go_on.set()
    assert await asyncio.to_thread(over.wait, 60)
    (error,) = refused
    assert "no permit was granted" in error
    assert waiting() == 0
    place.leave()


async def test_an_async_call_that_swallows_its_end_gets_no_place():
    refused = asyncio.get_running_loop().create_future()

    async def judge():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                async with reward_loop.limit("judge"):
                    refused.set_result("it was let in")
            except LimitError as error:
                refused.set_result(str(error))

    function, _ = scoring(judge, limits={"judge": {"max_concurrent": 1}}, timeout=0.01)
    assert isinstance((await function(SAMPLE)).exception, RewardTimeoutError)
    assert "no permit was granted" in await asyncio.wait_for(refused, 60)


async def test_a_name_that_is_not_configured():
    async def judge():
        async with reward_loop.limit("jugde"):
            return 1

    function, _ = scoring(judge, limits={"judge": {"max_concurrent": 1}})
    assert "no limit 'jugde'; did you mean 'judge'" in (await function(SAMPLE)).error
    # Where there are no limits at all, nothing is limited, and nothing is wrong.
    function, _ = scoring(judge)
    assert (await function(SAMPLE)).score == 1


async def test_the_default_limit_is_not_taken_twice():
    async def judge():
        async with reward_loop.limit("default"):
            return 1

    function, _ = scoring(judge)
    assert "already applies to the whole function" in (await function(SAMPLE)).error


async def test_a_function_can_be_tried_by_itself():
    async def judge():
        async with reward_loop.limit("judge", tokens=3) as lease:
            lease.used(tokens=2)
            return 1

    assert await judge() == 1
    with pytest.raises(RuntimeError, match="async with"), reward_loop.limit("judge"):
        pass


@pytest.mark.parametrize("inside", [True, False])
async def test_refusals_shrink_an_adaptive_limit(inside):
    async def judge():
        if not inside:
            raise Refused
        async with reward_loop.limit("judge"):
            raise Refused

    name = "judge" if inside else "default"
    function, kept = scoring(judge, limits={name: {"adaptive": True}}, retry={"max_attempts": 1})
    assert kept.snapshot()["limits"][name]["max_in_flight"] == 20
    for _ in range(WINDOW // 10):
        await function(SAMPLE)
    assert kept.snapshot()["limits"][name]["max_in_flight"] == 16


async def test_transient_errors_are_retried_and_counted():
    calls = 0

    async def judge():
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ConnectionResetError
        return 1

    function, _ = scoring(judge, retry={"initial_wait": 0.001})
    result = await function(SAMPLE)
    assert (result.score, result.attempts, calls) == (1, 3, 3)


async def test_after_the_last_attempt_the_sample_has_failed():
    async def judge():
        raise ConnectionResetError("by peer")

    function, _ = scoring(judge, retry={"initial_wait": 0.001})
    result = await function(SAMPLE)
    assert (result.outcome, result.attempts) == (Outcome.FAILED, 3)
    assert "sample u7" in result.error
    assert "was called 3 times; the last call raised" in result.error
    assert "ConnectionResetError: by peer" in result.error


async def test_a_deadline_is_not_tried_again():
    calls = 0

    async def hangs():
        nonlocal calls
        calls += 1
        await asyncio.Event().wait()

    function, _ = scoring(hangs, retry={"initial_wait": 0.001}, timeout=0.01)
    result = await function(SAMPLE)
    assert (result.outcome, result.attempts, calls) == (Outcome.FAILED, 1, 1)


@pytest.mark.parametrize(("at_cap", "score"), [("default", -1.0), ("mask", 0.0)])
async def test_a_budget_that_is_used_up(at_cap, score):
    calls = 0

    async def judge():
        nonlocal calls
        calls += 1
        async with reward_loop.limit("judge") as lease:
            lease.used(tokens=60)
        return 1

    config = RewardLoopConfig(budget={"max_tokens": 100, "at_cap": at_cap}, default_score=-1.0)
    manager = reward_loop.NaiveRewardLoopManager(config, compute_score=judge)
    rewards = [await manager.run_single(SAMPLE) for _ in range(4)]
    assert [reward["reward_score"] for reward in rewards] == [1, 1, score, score]
    info = rewards[-1]["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_masked"]) == ("unscored", at_cap == "mask")
    assert "sample u7" in info["reward_error"]
    assert (
        "was not called: the run's budget is used up: 120 of reward_loop.budget.max_tokens=100" in info["reward_error"]
    )
    assert calls == 2


async def test_a_budget_that_stops_the_run():
    async def judge():
        async with reward_loop.limit("judge") as lease:
            lease.used(cost=1)
        return 1

    manager = reward_loop.NaiveRewardLoopManager(RewardLoopConfig(budget={"max_cost": 1}), compute_score=judge)
    await manager.run_single(SAMPLE)
    with pytest.raises(reward_loop.BudgetSpentError, match="budget is used up"):
        await manager.run_single(SAMPLE)


@pytest.mark.parametrize("at_cap", ["stop", "default", "mask"])
async def test_the_budget_is_that_of_the_whole_job(at_cap):
    async def judge():
        async with reward_loop.limit("judge") as lease:
            lease.used(tokens=60)
        return 1

    given = {"budget": {"max_tokens": 100, "at_cap": at_cap}, "default_score": -1.0}
    service = LimitServer(RewardLoopConfig(**given))
    address = await service.start()
    # As in two processes: each has a loop, and so a connection, of its own.
    ready, spent = threading.Event(), threading.Event()

    def worker(first):
        async def run():
            config = RewardLoopConfig(job=address, **given)
            manager = reward_loop.NaiveRewardLoopManager(config, compute_score=judge)
            job = manager.limits
            await job.why_stopped()  # it is connected
            if first:
                await asyncio.to_thread(ready.wait)
                used = [await manager.run_single(SAMPLE) for _ in range(2)]
                await job.why_stopped()
                spent.set()
                job.close()
                return [reward["reward_score"] for reward in used]
            ready.set()
            await asyncio.to_thread(spent.wait)
            await job.why_stopped()
            try:
                return await manager.run_single(SAMPLE)
            finally:
                job.close()

        return asyncio.run(run())

    both = asyncio.gather(*(asyncio.to_thread(worker, first) for first in (True, False)), return_exceptions=True)
    used, other = await both
    assert used == [1, 1]
    message = "was not called: the run's budget is used up: 120 of reward_loop.budget.max_tokens=100"
    if at_cap == "stop":
        assert isinstance(other, reward_loop.BudgetSpentError)
        assert f"{message}. Raise it, or set reward_loop.budget.at_cap to default or mask" in str(other)
    else:
        assert other["reward_score"] == {"default": -1.0, "mask": 0.0}[at_cap]
        info = other["reward_extra_info"]
        assert (info["reward_outcome"], info["reward_masked"]) == ("unscored", at_cap == "mask")
        assert message in info["reward_error"]
    await service.stop()


async def test_eight_workers_keep_one_limit():
    # In verl 0.9, each worker has the whole limit for itself.
    limits = {"default": {"max_concurrent": 4}}
    service = LimitServer(RewardLoopConfig(limits=limits))
    address = await service.start()
    running = peak = 0
    four = asyncio.Barrier(4)

    async def judge():
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await four.wait()
        running -= 1
        return 1

    workers = [scoring(judge, limits=limits, job=address)[0] for _ in range(8)]
    results = await asyncio.gather(*(worker(SAMPLE) for worker in workers for _ in range(10)))
    assert peak == 4
    assert {result.outcome for result in results} == {Outcome.SCORED}
    for worker in workers:
        worker.close()
    await service.stop()


async def test_without_its_service_a_run_stops():
    limits = {"default": {"max_concurrent": 4}}
    service = LimitServer(RewardLoopConfig(limits=limits))
    address = await service.start()
    await service.stop()

    async def judge():
        return 1

    function, _ = scoring(judge, limits=limits, job=address)
    with pytest.raises(JobServiceError):
        await function(SAMPLE)


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
