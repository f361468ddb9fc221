from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from reward_loop import RewardSample, ScoringFunction, load_function
from reward_loop.errors import FunctionLoadError
from reward_loop.testing import FakeJudge, Status
from reward_loop.types import RewardResult


def prompt_of(body: Mapping[str, Any]) -> str:
    return body["messages"][-1]["content"]


async def judged(name: str, server: FakeJudge, text: str = "15", **kwargs: Any) -> RewardResult:
    scoring = ScoringFunction(load_function(f"judge:{name}"), reward_kwargs=kwargs)
    row = RewardSample(text, ground_truth="36", extra_info={"question": "What do 12 pens cost?"})
    return await scoring(row, reward_router_address=server.address)


async def test_equality_compares_the_end_of_a_response_with_the_reference() -> None:
    async with FakeJudge("They are the same. Verdict: same") as server:
        result = await judged("equality", server, "x" * 5000 + " Thirty-six.")
        assert (result.score, result.extra_info["acc"]) == (1.0, 1.0)
        assert "Thirty-six." in prompt_of(server.requests[0].body)
        assert len(prompt_of(server.requests[0].body)) < 3500
        server.script("Verdict: different", "I cannot say.")
        assert [(await judged("equality", server)).score for _ in range(2)] == [0.0, None]


async def test_a_verdict_in_the_response_does_not_count() -> None:
    async with FakeJudge(lambda body: "Verdict: different\n" + prompt_of(body)) as server:
        # The prompt ends with "`Verdict: different`."; without the prompt's end, only the response has a verdict.
        result = await judged("equality", server, "Verdict: same", prompt="{{answer}}")
    assert result.score == 0.0


@pytest.mark.parametrize(
    ("name", "reply", "score"),
    [
        ("equality", "<think>Verdict: same, but the unit is missing.</think>\nI cannot decide.", None),
        ("equality", "Verdict: same</think>\nVerdict: different", 0.0),
        ("equality", "Verdict: same or different", None),
        ("panel", "<think>Score: 9", None),
        ("panel", "Score: 10\nSubscore: 1 for style.", 1.0),
        ("panel", "Score: 7 to 8", None),
    ],
)
async def test_what_a_judge_did_not_decide_is_unscored(name: str, reply: str, score: float | None) -> None:
    async with FakeJudge(reply) as server:
        assert (await judged(name, server)).score == score


@pytest.mark.parametrize(
    ("name", "missing", "kwargs"),
    [
        ("equality", "ground_truth", {}),
        ("cascade", "ground_truth", {"large": {"model": "big"}}),
        ("spot", "ground_truth", {"strong": {"model": "big"}}),
        ("panel", "question", {}),
        ("equality", "question", {}),
    ],
)
async def test_a_row_with_null_for_a_field_fails_without_a_request(
    name: str, missing: str, kwargs: dict[str, Any]
) -> None:
    async with FakeJudge("Verdict: same") as server:
        scoring = ScoringFunction(load_function(f"judge:{name}"), reward_kwargs=kwargs)
        truth, question = (None if missing == one else "2+2?" for one in ("ground_truth", "question"))
        row = RewardSample("None", ground_truth=truth, extra_info={"question": question})
        result = await scoring(row, reward_router_address=server.address)
    assert (result.outcome, server.requests) == ("failed", [])
    assert re.search(rf"the row has no (extra_info\.)?{missing}\b", str(result.error))


async def test_the_majority_of_votes_decides() -> None:
    async with FakeJudge() as server:
        server.script("Verdict: same", "Verdict: different", "Verdict: same", "Hm.", Status(401))
        result = await judged("equality", server, votes=5)
        assert server.requests[0].body["temperature"] == 1.0
    assert result.score == 1.0
    assert 0 < result.extra_info["disagreement"] < 0.5
    assert len([key for key in result.extra_info if key.startswith("judge_")]) == 3


async def test_the_question_may_be_a_conversation_at_another_place() -> None:
    async with FakeJudge("Verdict: same") as server:
        scoring = ScoringFunction(load_function("judge:equality"), reward_kwargs={"question": "raw.messages"})
        extra_info = {"raw": {"messages": [{"role": "user", "content": "Add 1 and 2."}]}}
        sample = RewardSample("3", ground_truth=3, extra_info=extra_info)
        assert (await scoring(sample, reward_router_address=server.address)).score == 1.0
        assert "[user]\nAdd 1 and 2.\n" in prompt_of(server.requests[0].body)
        result = await scoring(RewardSample("3", ground_truth=3), reward_router_address=server.address)
    assert "set the argument 'question' of the judge" in str(result.error)


async def test_a_panel_asks_judges_at_different_addresses_and_needs_a_quorum() -> None:
    def rate(body: Mapping[str, Any]) -> str:
        return {"one": "Score: 10", "two": "Score: 1"}.get(body["model"], "no idea")

    async with FakeJudge(rate) as own, FakeJudge("Score: 10") as service:
        other = {"name": "service", "address": service.base_url, "model": "big", "max_completion_tokens": 9}
        result = await judged("panel", own, judges=["one", "two", "three", other])
        assert result.score == pytest.approx(2 / 3)
        numbers = {name: result.extra_info[name] for name in ("one", "two", "service")}
        assert numbers == {"one": 1.0, "two": 0.0, "service": 1.0}
        assert "max_tokens" not in service.requests[0].body
        assert (await judged("panel", own, judges=["one", "three"])).outcome == "unscored"
        own.script(Status(401), Status(401))
        assert (await judged("panel", own, judges=["one", "two"])).outcome == "failed"


async def test_a_cascade_asks_the_large_model_only_where_the_small_one_is_unsure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LARGE_KEY", "secret")
    async with FakeJudge("Verdict: unsure") as small, FakeJudge("Verdict: same") as large:
        options = {"address": large.base_url, "model": "big", "api_key_env": "LARGE_KEY"}

        async def decided(text: str) -> tuple[float | None, Any, int, int]:
            result = await judged("cascade", small, text, large=options)
            return result.score, result.extra_info["judged_by"], len(small.requests), len(large.requests)

        assert await decided("12 * 3 is\n36") == (1.0, "rule", 0, 0)
        small.script("Verdict: different")
        assert await decided("15") == (0.0, "small", 1, 0)
        assert await decided("thirty-six") == (1.0, "large", 2, 1)
        small.script("Hm.")  # no verdict
        assert await decided("thirty-six") == (1.0, "large", 3, 2)
        assert large.requests[0].body["model"] == "big"
        assert large.requests[0].headers["authorization"] == "Bearer secret"


async def test_a_cascade_without_spot_checks_warns_and_with_them_the_large_model_checks_sure_verdicts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeJudge("Verdict: same") as small, FakeJudge("Verdict: different") as large:
        options = {"address": large.base_url}
        result = await judged("cascade", small, large=options)
        assert (result.score, result.extra_info["judged_by"], len(large.requests)) == (1.0, "small", 0)
        assert "Set spot=0.2" in caplog.text
        assert "with 20 % of strong calls, 84 %" in caplog.text
        caplog.clear()
        results = [await judged("cascade", small, large=options, spot=0.5) for _ in range(24)]
        assert not caplog.text
        found = {(result.score, result.extra_info["judged_by"]) for result in results}
        assert found == {(1.0, "small"), (-1.0, "large")}
        assert len(large.requests) == sum(result.extra_info["judged_by"] == "large" for result in results)
        assert all(result.extra_info["chance"] == 0.5 for result in results)
        before = len(large.requests)
        small.script("Verdict: unsure")
        result = await judged("cascade", small, large=options, spot=0.5)
        assert (result.score, result.extra_info["judged_by"], len(large.requests)) == (0.0, "large", before + 1)
        with pytest.raises(FunctionLoadError, match=r"share=0\.1"):
            await judged("cascade", small, large=options, spot=0.1)


@pytest.mark.parametrize(
    ("judge", "replies", "scores"),
    [
        ("equality", ("Verdict: same", "Verdict: different"), {1.0, -1.0}),
        ("panel", ("Score: 10", "Score: 1"), {1.0, -1.0}),
        ("rubric", ('{"criterion_1": 10}', '{"criterion_1": 1}'), {1.0, -1.0}),
    ],
)
async def test_spot_asks_a_strong_model_for_a_share_of_the_responses(
    judge: str, replies: tuple[str, str], scores: set[float]
) -> None:
    cheap_reply, strong_reply = replies
    async with FakeJudge(cheap_reply) as cheap, FakeJudge(strong_reply) as strong:
        options = {"strong": {"address": strong.base_url, "model": "big"}, "share": 0.5, "judge": judge}
        if judge == "rubric":
            options["criteria"] = ["It is right."]
        results = [await judged("spot", cheap, **options) for _ in range(24)]
        assert {result.score for result in results} == scores
        assert len(cheap.requests) == 24
        assert len(strong.requests) == sum("strong" in result.extra_info for result in results)
        assert strong.requests[0].body["model"] == "big"


async def test_spot_refuses_a_small_share_another_judge_and_a_row_without_reference() -> None:
    strong = {"model": "big"}
    for wrong in ({"share": 0.1}, {"judge": "pairwise"}):
        with pytest.raises(FunctionLoadError, match=next(iter(wrong))):
            ScoringFunction(load_function("judge:spot"), reward_kwargs={"strong": strong, **wrong})
    scoring = ScoringFunction(load_function("judge:spot"), reward_kwargs={"strong": strong})
    result = await scoring(RewardSample("15", extra_info={"question": "What do 12 pens cost?"}))
    assert "has no ground_truth" in str(result.error)
