from __future__ import annotations

import json
from functools import partial

import pytest

import reward_loop
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import chat_complete, classify, score
from reward_loop.errors import ConfigError, RequestError
from reward_loop.testing import Answer, BadJson, Body, Drop, FakeJudge, Status


async def test_a_reply() -> None:
    async with FakeJudge() as judge:
        judge.script(Answer("It is right. Score: 9", "length"))
        reply = await chat_complete(judge.address, "Is it?", model="m", temperature=0, top_p=0.5)
        assert reply.text == "It is right. Score: 9"
        assert reply.finish_reason == "length"
        assert reply.cut_off
        assert reply.usage.completion_tokens == 5
        assert reply.model == "fake-judge"
        assert judge.requests[0].body == {
            "messages": [{"role": "user", "content": "Is it?"}],
            "model": "m",
            "temperature": 0,
            "top_p": 0.5,
        }


@pytest.mark.parametrize("request_", [{"stream": True}, {"n": 2}])
async def test_streams_and_several_replies_are_refused(request_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="one complete reply"):
        await chat_complete("127.0.0.1:1", "?", **request_)


async def test_tokens_correct_the_estimate_of_a_limit_that_is_held() -> None:
    async def compute_score(reward_router_address: str) -> float:
        async with reward_loop.limit("judge", tokens=1000):
            for _ in range(2):
                await chat_complete(reward_router_address, "?")
        await chat_complete(reward_router_address, "outside of the limit")
        return 1.0

    options = RewardLoopConfig(limits={"judge": {"tokens_per_minute": 10_000}})  # type: ignore[dict-item]
    async with FakeJudge("two words") as judge:
        function = ScoringFunction(compute_score, options=options)
        assert (await function(RewardSample("x"), reward_router_address=judge.address)).score == 1.0
        each = len(json.dumps(judge.requests[0].body).split()) + 2
    assert function.limits.tokens == 2 * each + len(json.dumps(judge.requests[-1].body).split()) + 2


@pytest.mark.parametrize(
    "usage",
    [
        {"total_tokens": 7},
        {"prompt_tokens": 3, "completion_tokens": 4},
        {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 7},  # with reasoning
        {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 5},
        {"prompt_tokens": "3", "completion_tokens": 4.0},
        {"input_tokens": 3, "output_tokens": 4, "total_tokens": "?"},
        {"prompt_tokens": 3, "completion_tokens": 0, "completion_tokens_details": {"reasoning_tokens": 4}},
        {"prompt_tokens": 3, "reasoning_tokens": 4},
        {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 1e300},
    ],
)
async def test_tokens_count_where_the_answer_cannot_be_read(usage: dict[str, object]) -> None:
    async def asks(reward_router_address: str) -> float:
        for ask in (chat_complete, classify, partial(score, documents=["a"])):
            with pytest.raises(RequestError):
                await ask(reward_router_address, "?")
        return 1.0

    function = ScoringFunction(asks, options=RewardLoopConfig(retry={"max_attempts": 1}))  # type: ignore[arg-type]
    async with FakeJudge() as judge:
        judge.script(*(Body({"usage": usage}) for _ in range(3)))
        assert (await function(RewardSample("x"), reward_router_address=judge.address)).error is None
    assert function.limits.tokens == 21


async def test_a_busy_judge_is_asked_again() -> None:
    async def compute_score(reward_router_address: str) -> float:
        return float((await chat_complete(reward_router_address, "?")).text)

    options = RewardLoopConfig(retry={"initial_wait": 0.001, "max_attempts": 5})  # type: ignore[arg-type]
    async with FakeJudge("0.5") as judge:
        judge.script(Status(429, retry_after=0.001), BadJson(), Drop(), Body({"choices": []}), Status(400))
        function = ScoringFunction(compute_score, options=options)
        result = await function(RewardSample("x"), reward_router_address=judge.address)
        # The client repeats each request, and only the refusal is left to the retries of the function.
        assert (result.outcome, result.attempts, len(judge.requests)) == ("failed", 2, 5)
        assert "status 400" in (result.error or "")
        result = await function(RewardSample("x"), reward_router_address=judge.address)
        assert (result.score, result.attempts) == (0.5, 1)
