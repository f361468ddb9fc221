from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import pytest

from reward_loop import RewardSample, ScoringFunction, load_function
from reward_loop.testing import Answer, FakeJudge, Status
from reward_loop.types import RewardResult


def prompt_of(body: Mapping[str, Any]) -> str:
    return body["messages"][0]["content"]


async def judged(name: str, server: FakeJudge, text: str = "15", **kwargs: Any) -> RewardResult:
    scoring = ScoringFunction(load_function(f"judge:{name}"), reward_kwargs=kwargs)
    row = RewardSample(text, ground_truth="36", extra_info={"question": "What do 12 pens cost?"})
    return await scoring(row, reward_router_address=server.address)


async def test_equality_compares_the_end_of_a_response_with_the_reference() -> None:
    async with FakeJudge("They are the same.\n<verdict>same</verdict>") as server:
        result = await judged("equality", server, "x" * 5000 + " Thirty-six.")
        assert (result.score, result.extra_info["acc"]) == (1.0, 1.0)
        assert "Thirty-six." in prompt_of(server.requests[0].body)
        assert len(prompt_of(server.requests[0].body)) < 3500
        server.script("<verdict>different</verdict>", "I cannot say.", "Hm.")
        assert [(await judged("equality", server)).score for _ in range(2)] == [0.0, None]


async def test_the_prompts_of_different_answers_share_all_before_the_answer() -> None:
    async with FakeJudge("<verdict>same</verdict>") as server:
        for name, kwargs in (
            ("equality", {}),
            ("rubric", {"criteria": ["x"]}),
            ("rubric", {"criteria": ["x"], "separate": True}),
        ):
            for text in ("15", "thirty-six"):
                await judged(name, server, text, **kwargs)
            first, second = (prompt_of(server.requests[i].body) for i in (0, 1 if name == "equality" else 2))
            shared = len(os.path.commonprefix([first, second]))  # noqa: RUF071 - texts
            assert shared > first.index("(The text between"), name
            assert len(first) - shared < 300
            server.requests.clear()


@pytest.mark.parametrize(
    ("name", "missing"), [("equality", "ground_truth"), ("rubric", "question"), ("equality", "question")]
)
async def test_a_row_with_null_for_a_field_fails_without_a_request(name: str, missing: str) -> None:
    async with FakeJudge("<verdict>same</verdict>") as server:
        kwargs = {"criteria": ["x"]} if name == "rubric" else {}
        scoring = ScoringFunction(load_function(f"judge:{name}"), reward_kwargs=kwargs)
        truth, question = (None if missing == one else "2+2?" for one in ("ground_truth", "question"))
        row = RewardSample("None", ground_truth=truth, extra_info={"question": question})
        result = await scoring(row, reward_router_address=server.address)
    assert (result.outcome, server.requests) == ("failed", [])
    assert re.search(rf"has no (extra_info\.|`)?{missing}\b", str(result.error))


async def test_the_majority_of_votes_decides() -> None:
    async with FakeJudge() as server:
        same, different = "<verdict>same</verdict>", "<verdict>different</verdict>"
        server.script(same, different, same, Answer(different, "length"), Status(401))
        result = await judged("equality", server, votes=5)
        assert server.requests[0].body["temperature"] == 1.0
    assert result.score == 1.0
    assert 0 < result.extra_info["disagreement"] < 0.5
    assert len([key for key in result.extra_info if key.startswith("judge_")]) == 3


async def test_the_question_may_be_a_conversation_at_another_place() -> None:
    async with FakeJudge("<verdict>same</verdict>") as server:
        scoring = ScoringFunction(load_function("judge:equality"), reward_kwargs={"question": "raw.messages"})
        extra_info = {"raw": {"messages": [{"role": "user", "content": "Add 1 and 2."}]}}
        sample = RewardSample("3", ground_truth=3, extra_info=extra_info)
        assert (await scoring(sample, reward_router_address=server.address)).score == 1.0
        assert "[user]\nAdd 1 and 2.\n" in prompt_of(server.requests[0].body)
        result = await scoring(RewardSample("3", ground_truth=3), reward_router_address=server.address)
    assert "set the argument 'question' of the judge" in str(result.error)


async def test_a_panel_asks_judges_at_different_addresses_and_needs_a_quorum() -> None:
    def rate(body: Mapping[str, Any]) -> str:
        ratings = {"one": '{"x": 10}', "two": '{"x": 1}'}
        return ratings.get(body["model"], "no idea")

    criteria = [{"text": "It is right.", "name": "x"}]
    async with FakeJudge(rate) as own, FakeJudge('{"x": 10}') as service:
        other = {"name": "service", "address": service.base_url, "model": "big", "max_completion_tokens": 9}
        result = await judged("rubric", own, criteria=criteria, judges=["one", "two", "three", other])
        assert result.score == pytest.approx(2 / 3)
        numbers = {name: result.extra_info[name] for name in ("one", "two", "service")}
        assert numbers == {"one": 1.0, "two": 0.0, "service": 1.0}
        assert "max_tokens" not in service.requests[0].body
        assert (await judged("rubric", own, criteria=criteria, judges=["one", "three"])).outcome == "unscored"
        own.script(Status(401), Status(401))
        assert (await judged("rubric", own, criteria=criteria, judges=["one", "two"])).outcome == "failed"
