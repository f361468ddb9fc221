from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from reward_loop import RewardSample, ScoringFunction, load_function
from reward_loop.errors import FunctionLoadError
from reward_loop.testing import FakeJudge
from reward_loop.types import RewardResult

CRITERIA = [{"name": "correct", "text": "The result is 36.", "weight": 3}, "Each step follows."]


def prompt_of(body: Mapping[str, Any]) -> str:
    return body["messages"][0]["content"]


def rate(body: Mapping[str, Any]) -> str:
    """Rate 10 what the criterion `correct` says, and 1 all else."""
    prompt = prompt_of(body)
    if "Consider only this criterion" in prompt:
        return f"<verdict>{10 if '36.' in prompt else 1}</verdict>"
    form = re.findall(r"in place of N: (.*)", prompt)[0]
    return form.replace('"correct": N', '"correct": 10').replace("N", "1")


async def judged(server: FakeJudge, row: Mapping[str, Any] | None = None, **kwargs: Any) -> RewardResult:
    scoring = ScoringFunction(load_function("judge:rubric"), reward_kwargs=kwargs)
    extra_info = {"question": "What do 12 pens cost?", **(row or {})}
    return await scoring(RewardSample("36", extra_info=extra_info), reward_router_address=server.address)


@pytest.mark.parametrize(("separate", "requests"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("given", [CRITERIA, json.dumps(CRITERIA)])
async def test_criteria_of_the_row_are_rated_and_weighted(separate: bool, requests: int, given: Any) -> None:
    async with FakeJudge(rate) as server:
        result = await judged(server, {"checks": {"list": given}}, criteria="checks.list", separate=separate)
        assert len(server.requests) == requests
        prompt = prompt_of(server.requests[0].body)
    assert result.score == 0.75
    assert (result.extra_info["correct"], result.extra_info["criterion_2"]) == (1.0, 0.0)
    assert "disagreement" not in result.extra_info
    # What most requests share comes first, for prefix caching.
    assert prompt.index("The result is 36.") < prompt.index("12 pens") < prompt.index("\n36\n")


async def test_criteria_of_a_parquet_file() -> None:
    numpy = pytest.importorskip("numpy")
    async with FakeJudge(rate) as server:
        first = {"name": "correct", "text": "The result is 36.", "weight": 3.0}
        given = [first, {"name": None, "text": "Each step follows.", "weight": None}]
        result = await judged(server, {"criteria": numpy.array(given, dtype=object)})
    assert result.score == 0.75


@pytest.mark.parametrize("criteria", [CRITERIA, json.dumps(CRITERIA)])
async def test_the_same_criteria_for_all_rows(criteria: Any) -> None:
    async with FakeJudge(rate) as server:
        assert (await judged(server, criteria=criteria)).score == 0.75
        assert (await judged(server, criteria=criteria, votes=3)).extra_info["judge_2"] == 0.75


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "the row has no extra_info.criteria, only question: set the argument 'criteria'"),
        ({"criteria": []}, "at least one criterion"),
        ({"criteria": [{"weight": 1}]}, "each item a text or {text: ..., name: ..., weight: ...}; got [{'weight': 1}]"),
        ({"criteria": [{"text": "a", "weight": -1}]}, "at least one positive"),
        ({"criteria": [{"text": "a", "name": "x"}, {"text": "b", "name": "x"}]}, "another name"),
        ({"criteria": [{"text": "a", "points": 5}]}, "got [{'text': 'a', 'points': 5}]"),
        ({"criteria": 7}, "expected a list"),
    ],
)
async def test_a_row_without_valid_criteria_fails_alone(row: Mapping[str, Any], problem: str) -> None:
    async with FakeJudge(rate) as server:
        result = await judged(server, row)
        assert not server.requests
    assert result.outcome == "failed"
    assert problem in str(result.error)


async def test_without_one_of_the_ratings_a_sample_is_unscored() -> None:
    async with FakeJudge(rate) as server:
        server.script(*['{"correct": 10}'] * 2)
        assert (await judged(server, criteria=CRITERIA)).outcome == "unscored"
        server.script(*["I like it."] * 4)
        assert (await judged(server, criteria=CRITERIA, separate=True)).outcome == "unscored"


async def test_a_prompt_of_the_user_replaces_the_ready_one() -> None:
    async with FakeJudge('{"criterion_1": 1}') as server:
        result = await judged(server, criteria=["x"], prompt="Rate {{answer}}: {{form}}", low=0, high=1)
        assert prompt_of(server.requests[0].body).startswith("Rate (The text between")
    assert result.score == 1.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"criteria": "[7]"},
        {"prompt": "Rate {{response}}"},
        {"attempts": 0},
        {"votes": 0},
        {"judges": ["a", "a"]},
        {"judges": ["a", "b"], "quorum": 3},
        {"combine": "best"},
        {"low": 1, "high": 1},
    ],
)
def test_invalid_arguments_are_refused_before_a_run(kwargs: dict[str, Any]) -> None:
    with pytest.raises(FunctionLoadError, match="cannot be instantiated"):
        ScoringFunction(load_function("judge:rubric"), reward_kwargs=kwargs)


async def test_a_criterion_may_have_the_name_of_the_reason() -> None:
    async with FakeJudge(rate) as server:
        result = await judged(server, criteria=[{"name": "Reason", "text": "It says why."}])
        assert len(server.requests) == 1
    assert (result.outcome, result.extra_info["Reason"]) == ("scored", 0.0)
