from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
from typing import Any

import pytest

from reward_loop import RewardSample, ScoringFunction, combine, isolated
from reward_loop.errors import FunctionLoadError, TransientError
from reward_loop.types import RewardResult


def form(solution_str: str) -> float:
    return float("####" in solution_str)


def truth(solution_str: str, ground_truth: str) -> dict[str, Any]:
    right = solution_str.endswith(ground_truth)
    return {"score": right, "length": len(solution_str), "acc": 7}


async def judge(solution_str: str, extra_info: dict[str, Any], prompt: str | None = None) -> float | None:
    await asyncio.sleep(0)
    return extra_info.get("rating", 0.5)


def bonus(solution_str: str, bonus: float) -> float:
    return bonus


async def score(function: Any, text: str = "#### 4", **fields: Any) -> RewardResult:
    return await ScoringFunction(function)(RewardSample(text, ground_truth="4", **fields))


async def test_the_score_is_the_weighted_sum_and_each_part_is_logged() -> None:
    result = await score(combine(form=(form, 0.2), truth=(truth, 1)))
    assert (result.score, result.work_s > 0) == (pytest.approx(1.2), True)
    assert result.extra_info == {
        "score": pytest.approx(1.2),
        "form": 1.0,
        "truth": 1.0,
        "truth/length": 6,
        "truth/acc": 7,
    }
    assert result.components == {"form": 1.0, "truth": 1.0, "truth/length": 6.0, "truth/acc": 7.0}


@pytest.mark.parametrize(
    ("parts", "is_async", "expected"),
    [
        ({"form": (form, 0.2), "judge": (judge, -1)}, False, -0.3),
        ({"judge": (judge, 1), "again": (judge, 1)}, True, 1.0),
        ({"bonus": (functools.partial(bonus, bonus=3), 1), "inner": (combine(form=(form, 2)), 0.5)}, False, 4.0),
        ({"lazy": (lambda solution_str, extra_info: judge(solution_str, extra_info), 1)}, False, 0.5),
    ],
)
async def test_sync_and_async_parts(parts: dict[str, Any], is_async: bool, expected: float) -> None:
    function = combine(**parts)
    assert ScoringFunction(function).is_async is is_async
    assert (await score(function)).score == pytest.approx(expected)


def test_it_takes_what_its_parts_take() -> None:
    function = combine(truth=(truth, 1), judge=(judge, 1))
    scoring = ScoringFunction(function)
    assert scoring.requires == {"solution_str", "ground_truth", "extra_info"}
    assert set(inspect.signature(function).parameters) == {"solution_str", "ground_truth", "extra_info", "prompt"}
    assert scoring.name == "combine(truth, judge) (test_combine.py)"


async def test_async_parts_run_at_the_same_time() -> None:
    arrived = asyncio.Barrier(2)

    async def part(solution_str: str) -> float:
        await arrived.wait()
        return 1.0

    assert (await asyncio.wait_for(score(combine(a=(part, 1), b=(part, 1))), 30)).score == 2.0


async def test_no_part_sees_what_another_has_changed_nor_does_a_retry() -> None:
    calls = []

    def changes(extra_info: dict[str, Any], ground_truth: list[str]) -> float:
        extra_info["tags"].append("seen")
        ground_truth.clear()
        calls.append(len(extra_info["tags"]))
        if len(calls) == 1:
            raise TransientError("again")
        return float(len(extra_info["tags"]))

    sample = RewardSample("", ground_truth=["4"], extra_info={"tags": ["a"]})
    scoring = ScoringFunction(combine(one=(changes, 1), other=(changes, 10)))
    result = await scoring(sample)
    assert (result.score, result.attempts, calls) == (22.0, 2, [2, 2, 2])
    assert (sample.extra_info, sample.ground_truth) == ({"tags": ["a"]}, ["4"])


async def test_a_part_without_a_score_leaves_the_sample_unscored_with_its_reason() -> None:
    function = combine(form=(form, 1), judge=(lambda: {"score": None, "explanation": "unscored: no verdict"}, 1))
    result = await score(function)
    assert (result.outcome, result.score, result.extra_info["form"]) == ("unscored", None, 1.0)
    assert "judge: no verdict" in str(result.error)
    assert (await score(combine(judge=(judge, 1)), extra_info={"rating": None})).outcome == "unscored"


async def test_a_part_that_fails_fails_the_sample_with_its_name() -> None:
    result = await score(combine(form=(form, 1), text=(lambda: "0.5", 1)))
    assert result.outcome == "failed"
    assert "the part text returned '0.5'" in str(result.error)
    result = await score(combine(dense=(lambda: {"score": 1, "turn_level_scores": [1]}, 1)))
    assert "the part dense returned turn_level_scores" in str(result.error)


class Ranks:
    def compute_score(self, solution_str: str) -> float:
        return 1.0

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return scores


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "name each part"),
        ({"reward_error": (form, 1)}, "name each part"),
        ({"score": (form, 1)}, "name each part"),
        ({"form": form}, "a function and its weight"),
        ({"form": (form, float("nan"))}, "a function and its weight"),
        ({"form": (lambda solution_strs: [], 1)}, "they are lists"),
        ({"form": (isolated(lambda solution_str: 1), 1)}, "mark the whole"),
        ({"ranks": (Ranks, 1)}, "post_process_scores of ranks"),
    ],
)
def test_invalid_parts_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(FunctionLoadError, match=message):
        combine(**parts)


def test_async_parts_do_not_run_in_a_process() -> None:
    mixed = combine(form=(form, 0.2), judge=(judge, 1))
    with pytest.raises(FunctionLoadError, match=r"combine\(form, judge\).* has async parts"):
        ScoringFunction(mixed, isolation="process")


@pytest.mark.processes
async def test_a_combination_runs_in_a_process() -> None:
    function = isolated(combine(form=(form, 0.2), truth=(truth, 1)))
    assert pickle.loads(pickle.dumps(function))(solution_str="#### 4", ground_truth="4")["score"] == pytest.approx(1.2)
    scoring = ScoringFunction(function)
    try:
        assert (await scoring(RewardSample("#### 4", ground_truth="4"))).score == pytest.approx(1.2)
    finally:
        await asyncio.to_thread(scoring.close)
