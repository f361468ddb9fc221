from __future__ import annotations

import json

import pytest

import reward_loop
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import chat_complete
from reward_loop.errors import ConfigError, RequestError
from reward_loop.records import ActiveSample
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


async def test_a_conversation_is_sent_as_it_is() -> None:
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "?"}]
    async with FakeJudge() as judge:
        assert not (await chat_complete(judge.address, messages)).cut_off
        assert judge.requests[0].body == {"messages": messages}


async def test_an_answer_without_a_reply_is_an_error_that_shows_it() -> None:
    async with FakeJudge() as judge:
        judge.script(Body({"choices": []}))
        with pytest.raises(RequestError, match="'choices': \\[\\]") as raised:
            await chat_complete(judge.address, "?")
        assert raised.value.transient


@pytest.mark.parametrize("request_", [{"stream": True}, {"n": 2}])
async def test_streams_and_several_replies_are_refused(request_: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="one complete reply"):
        await chat_complete("127.0.0.1:1", "?", **request_)


async def test_tokens_are_counted_for_the_sample() -> None:
    async with FakeJudge("two words") as judge:
        with ActiveSample(RewardSample("x"), "f") as call:
            replies = [await chat_complete(judge.address, "?") for _ in range(3)]
    assert call.completion_tokens == 6
    assert call.prompt_tokens == sum(reply.usage.prompt_tokens for reply in replies) > 0


async def test_a_number_of_tokens_that_no_model_has_is_not_counted() -> None:
    choices = [{"message": {"content": "fine"}, "finish_reason": "stop"}]
    async with FakeJudge() as judge:
        judge.script(Body({"choices": choices, "usage": {"prompt_tokens": 10**400, "completion_tokens": 3}}))
        with ActiveSample(RewardSample("x"), "f") as call:
            await chat_complete(judge.address, "?")
    assert (call.prompt_tokens, call.completion_tokens) == (0, 3)


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
