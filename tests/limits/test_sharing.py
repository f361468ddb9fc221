"""Which calls share limits, budget and token counts, and what grows or paces a limit: through the public interface."""

import asyncio
import functools
import time
from types import SimpleNamespace

import pytest

import reward_loop
from reward_loop import LimitError, Outcome, RewardLoopConfig, RewardResult, RewardSample, ScoringFunction
from reward_loop.client import Judge, Number, chat_complete
from reward_loop.limits.local import LocalLimits
from reward_loop.testing import FakeJudge, Status

SAMPLE = RewardSample("4", uid="u7")
JUDGE = reward_loop.limit("judge")
NO_RETRY = {"max_attempts": 1}


def status(limits):
    return limits.snapshot()["limits"]


async def ask(reward_router_address):
    await chat_complete(reward_router_address, "?")
    return 1.0


def ask_in_thread(reward_router_address):
    return asyncio.run(ask(reward_router_address))


async def ask_within_judge(reward_router_address):
    async with JUDGE:
        return await ask(reward_router_address)


async def ask_judge(reward_router_address):
    await Judge("{{it}}", Number(0, 1))(reward_router_address, it="?")
    return 1.0


async def ask_within_two_limits(reward_router_address):
    async with reward_loop.limit("service"), JUDGE:  # "judge" is held twice
        return await ask_within_judge(reward_router_address)


@pytest.mark.parametrize("function", [ask, ask_in_thread, ask_judge, ask_within_judge, ask_within_two_limits])
async def test_tokens_of_the_client_count_once_in_each_limit_around_the_request(function):
    limits = {name: {"tokens_per_minute": 10_000, "burst_seconds": 30} for name in ("default", "service", "judge")}
    scoring = ScoringFunction(function, options=RewardLoopConfig(limits=limits))
    async with FakeJudge("0.5") as judge:
        for _ in range(3):
            assert (await scoring(SAMPLE, reward_router_address=judge.address)).error is None
    used = scoring.limits.tokens
    assert used > 0
    assert used % 3 == 0
    await asyncio.to_thread(scoring.close)


async def judge_within():
    async with JUDGE, JUDGE as lease:
        await asyncio.sleep(0.001)
        lease.used(tokens=1)
    return 1.0


def judge_within_in_thread():
    with JUDGE, JUDGE as lease:
        lease.used(tokens=1)
    return 1.0


@pytest.mark.parametrize("function", [judge_within, judge_within_in_thread])
async def test_one_limit_object_is_shared_by_concurrent_calls(function):
    scoring = ScoringFunction(function, options=RewardLoopConfig(limits={"judge": {"max_concurrent": 40}}))
    results = await asyncio.gather(*(scoring(SAMPLE) for _ in range(20)))
    assert [result.error for result in results] == [None] * 20
    assert scoring.limits.tokens == 20
    assert status(scoring.limits)["judge"]["in_flight"] == 0


async def test_limits_and_the_budget_hold_for_post_process_scores():
    judges = SimpleNamespace(compute_score=judge_within, post_process_scores=lambda scores: [judge_within_in_thread()])
    scoring = ScoringFunction(judges, options=RewardLoopConfig(limits={"judge": {"max_concurrent": 2}}))
    assert await scoring.post_process_scores([0.0]) == [1.0]
    assert (scoring.limits.tokens, status(scoring.limits)["judge"]["in_flight"]) == (1, 0)


async def test_limits_refuse_a_second_event_loop_while_the_first_one_runs():
    limits = LocalLimits(RewardLoopConfig(limits={"judge": {"max_concurrent": 1}}))
    (await limits.acquire("judge")).leave()
    with pytest.raises(LimitError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, limits.acquire("judge"))


def test_a_budget_outlasts_an_event_loop():
    options = RewardLoopConfig(limits={"judge": {"max_concurrent": 2}}, budget={"max_tokens": 1})
    scoring = ScoringFunction(judge_within, options=options)
    assert asyncio.run(scoring(SAMPLE)).score == 1.0
    assert "budget is used up" in asyncio.run(scoring(SAMPLE)).error


class Unavailable(Exception):
    status = 503


async def hangs():
    await asyncio.Event().wait()


async def unavailable():
    raise Unavailable


async def breaks_within_judge():
    async with JUDGE:
        raise ConnectionResetError


@pytest.mark.parametrize("function", [hangs, unavailable, breaks_within_judge])
async def test_an_outage_does_not_grow_an_adaptive_limit(function):
    limits = {"default": {"adaptive": True}, "judge": {"adaptive": True}}
    timeout = 0.01 if function is hangs else 60
    options = RewardLoopConfig(limits=limits, timeout=timeout, retry=NO_RETRY, outage_timeout_s=0)
    scoring = ScoringFunction(function, options=options)
    await asyncio.gather(*(scoring(SAMPLE) for _ in range(60)))
    found = status(scoring.limits)
    assert {name: found[name]["max_in_flight"] for name in limits} == {"default": 20, "judge": 20}
    await asyncio.to_thread(scoring.close)


async def test_a_failed_request_that_the_function_handles_does_not_grow_an_adaptive_limit():
    async def handles(reward_router_address):
        async with reward_loop.limit("service"), JUDGE:
            try:
                await chat_complete(reward_router_address, "?")
            except reward_loop.RequestError:
                return 0.0

    limits = {name: {"adaptive": True} for name in ("default", "service", "judge")}
    scoring = ScoringFunction(handles, options=RewardLoopConfig(limits=limits, retry=NO_RETRY))
    async with FakeJudge("0.5") as judge:
        judge.script(*(Status(500) for _ in range(40)))
        await asyncio.gather(*(scoring(SAMPLE, reward_router_address=judge.address) for _ in range(40)))
        assert {status(scoring.limits)[name]["max_in_flight"] for name in limits} == {20}
        judge.script(*(Status(429, retry_after=0) for _ in range(3)))
        await asyncio.gather(*(scoring(SAMPLE, reward_router_address=judge.address) for _ in range(3)))
    assert {status(scoring.limits)[name]["max_in_flight"] for name in limits} == {16}


async def test_answers_grow_an_adaptive_limit():
    answers = functools.partial(asyncio.sleep, 0, 1.0)
    scoring = ScoringFunction(answers, options=RewardLoopConfig(limits={"default": {"adaptive": True}}))
    await asyncio.gather(*(scoring(SAMPLE) for _ in range(60)))
    assert status(scoring.limits)["default"]["max_in_flight"] >= 40


@pytest.mark.parametrize(("burst_seconds", "at_once"), [(1.0, 100), (0.001, 1), (2.5, 250)])
async def test_a_minutes_requests_do_not_begin_at_once(burst_seconds, at_once, monkeypatch):
    limit = {"requests_per_minute": 6000, "burst_seconds": burst_seconds}
    limits = LocalLimits(RewardLoopConfig(limits={"judge": limit}))
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        requests = [limits.request("judge") for _ in range(300)]
    assert sum(request.done() for request in requests) == at_once
    for request in requests:
        request.cancel()


@pytest.mark.parametrize(("reports", "logged"), [(False, 1), (True, 0)])
async def test_a_budget_for_which_nothing_counts_is_logged(reports, logged, caplog):
    limits = LocalLimits(RewardLoopConfig(budget={"max_tokens": 1000}))
    for _ in range(200):
        limits.spend(0.5, float(reports))
        limits.count(RewardResult(Outcome.SCORED, 1.0))
    assert sum("reward_loop.budget.max_tokens=1000: 64 samples" in message for message in caplog.messages) == logged
