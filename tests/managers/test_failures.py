"""Samples without a score are grouped by the type of the exception and its line, and fit into one line."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardResult, RewardSample
from reward_loop.index.index import open_index
from reward_loop.index.questions import report
from reward_loop.managers.failures import Failures
from reward_loop.records import records


def compute_score(solution_str: str) -> float | None:
    if solution_str == "none":
        return None
    if solution_str.startswith("key"):
        return {}[solution_str]
    return float(solution_str)


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(compute_score)
    return first + next(i for i, line in enumerate(lines) if text in line)


def result_of(**info: Any) -> RewardResult:
    return RewardResult.of({"reward_score": 0.0, "reward_extra_info": info})


async def results_of(answers: list[str], **options: Any) -> list[RewardResult]:
    function = options.pop("compute_score", compute_score)
    manager = NaiveRewardLoopManager({"max_failed_share": 1.0, **options}, compute_score=function)
    samples = [RewardSample(answer, uid=f"u{i}") for i, answer in enumerate(answers)]
    try:
        found = [await manager.run_single(sample) for sample in samples]
    finally:
        await asyncio.to_thread(manager.close)
    return [RewardResult.of(reward) for reward in found]


FAILING = [f"no number: {i}" for i in range(15)] + [f"key {i}" for i in range(4)] + ["none", "none", "1", "2"]


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.integration)])
async def test_a_cause_with_data_in_its_text_is_one_cause(isolation: str) -> None:
    line = Failures.of(await results_of(FAILING, isolation=isolation, max_processes=1)).line("reward-loop view rewards")
    assert line is not None
    where = f"in compute_score ({__file__}:{line_of('float(solution_str)')})"
    assert line.startswith(
        f"19 failed and 2 unscored of 23 samples; the most frequent of 3 causes, 15 times: ValueError {where}; first: "
        "sample u0: compute_score (test_failures.py) raised ValueError: could not convert string to float: 'no number:"
    )
    assert line.endswith(". To see them: reward-loop view rewards")
    assert "\n" not in line


async def test_without_a_missing_score_there_is_no_line() -> None:
    assert Failures.of(await results_of(["1", "2"])).line() is None
    assert (
        Failures.of([result_of(), result_of(reward_outcome=None)]).line() is None
    )  # of a manager that reports no outcome


def judged(solution_str: str) -> dict[str, Any]:
    """Return what a judge's `Judgement.reward` returns for a reply that is cut off, or has no verdict."""
    reason = f"no single number follows the last 'Score:': {solution_str!r}"
    if solution_str == "cut":
        reason = "the reply may be cut off: its finish_reason is 'length', not 'stop'; max_tokens may be too low"
    return {"score": None, "verdict": None, "explanation": f"unscored: {reason}\nA reply."}


async def test_the_reason_of_a_judge_is_the_cause_without_the_text_of_the_reply() -> None:
    line = Failures.of(await results_of(["a", "b", "cut", "cut", "cut"], compute_score=judged)).line()
    assert line == (
        "5 unscored of 5 samples; the most frequent of 2 causes, 3 times: no score from judged (test_failures.py): "
        "the reply may be cut off; first: sample u2: judged (test_failures.py) gave no score: the reply may be cut "
        "off: its finish_reason is 'length', not 'stop'; max_tokens may be too low"
    )


async def test_one_cause_with_a_long_message_of_several_lines_is_one_short_line() -> None:
    error = "sample a: " + "x" * 1000 + "\nFile"
    line = Failures.of([result_of(reward_outcome="failed", reward_error=error, reward_cause="KeyError")] * 3).line()
    assert line is not None
    assert line.startswith("3 failed of 3 samples: KeyError; first: sample a: xxx")
    assert (len(line) < 400, "\n" in line) == (True, False)


async def test_records_have_the_cause_and_the_report_groups_by_it(tmp_path: Any) -> None:
    folder = str(tmp_path / "rewards")
    await results_of(FAILING, log_dir=folder)
    await asyncio.to_thread(records(folder).flush)
    with open_index(tmp_path / "rewards") as index:
        found = report(index)
    assert [(cause["outcome"], cause["count"]) for cause in found["causes"]] == [
        ("failed", 15),
        ("failed", 4),
        ("unscored", 2),
    ]
    assert found["causes"][0]["cause"] == f"ValueError in compute_score ({__file__}:{line_of('float(solution_str)')})"
    assert found["causes"][1]["cause"] == f"KeyError in compute_score ({__file__}:{line_of('{}[')})"


async def test_wrong_values_of_one_function_are_one_cause() -> None:
    def echo(solution_str: str) -> str:
        return solution_str

    (cause,) = {result.cause for result in await results_of(["text 1", "text 2"], compute_score=echo)}
    assert cause is not None
    assert cause.startswith("InvalidScoreError in ")
    assert cause.endswith("echo (test_failures.py)")
