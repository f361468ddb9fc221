"""Probes of the judge before a run, with judges whose mistakes are known."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward_loop import ConfigError, RewardLoopConfig, RewardSample
from reward_loop.client import spot_check
from reward_loop.config import AuditConfig, parse
from reward_loop.offline.check import CheckReport, check
from reward_loop.offline.check_judge import most_calls

SAMPLES = [
    RewardSample(
        f"I add the numbers. It is {i if i % 2 else -1}.", ground_truth=str(i), uid=f"q{i}", prompt=f"What is {i}?"
    )
    for i in range(20)
]


def right(solution_str: str, ground_truth: str) -> float:
    return float(solution_str.rstrip(".").split(" ")[-1] == ground_truth)


class Gullible:
    """A judge that accepts an answer in a share of the cases."""

    def __init__(self, answer: str, share: float) -> None:
        self.answer, self.share, self.dice, self.calls = answer, share, random.Random(1), 0

    def compute_score(self, solution_str: str, ground_truth: str) -> float:
        self.calls += 1
        if solution_str == self.answer:
            return float(self.dice.random() < self.share)
        return right(solution_str, ground_truth)


async def found(
    function: Any, samples: list[RewardSample] = SAMPLES, **options: Any
) -> tuple[CheckReport, dict[str, str]]:
    config = parse(RewardLoopConfig, options, "reward_loop")
    report = await check(function, samples, options=config, judge=True, max_blocked_s=600.0)
    return report, {finding.check: f"{finding.status}: {finding.text}" for finding in report.findings}


async def test_a_strict_judge_has_no_problem() -> None:
    report, findings = await found(right)
    assert report.problems == []
    assert findings["judge"].startswith("ok: 160 probes; an answer with a score above 0.5")
    kinds = {kind.name: (kind.asked, kind.positive) for kind in report.probes}
    canaries = dict.fromkeys(("empty", "other_answer", "cut_off", "question"), (20, 0))
    assert kinds == {"master_key": (40, 0), **canaries, "again": (20, 20), "frame": (20, 20)}


async def test_a_judge_that_accepts_a_colon_in_60_percent_of_cases_is_a_problem_with_advice() -> None:
    judge = Gullible(":", 0.6)
    report, findings = await found(judge)
    (problem,) = report.problems
    assert problem.check == "master key ':'"
    assert "the judge accepts" in problem.text
    assert "fence the answer" in problem.text
    (key,) = [kind for kind in report.probes if kind.name == "master key ':'"]
    assert key.asked == 20
    assert 0.3 < key.positive / key.asked < 0.9
    assert findings["other master keys"] == "ok: none of 36 accepted"
    # The check itself makes 2 * 20 + 20 + 3 calls.
    assert judge.calls - 63 <= most_calls(20, RewardLoopConfig()) == 220


async def test_a_second_check_of_the_same_rows_makes_the_same_probes() -> None:
    def asked_about() -> tuple[list[tuple[str, str]], Any]:
        calls: list[tuple[str, str]] = []

        def judge(solution_str: str, ground_truth: str) -> float:
            calls.append((solution_str, ground_truth))
            return right(solution_str, ground_truth)

        return calls, judge

    calls, judge = asked_about()
    await found(judge, SAMPLES[:6])
    again, judge = asked_about()
    await found(judge, SAMPLES[:6])
    assert sorted(calls) == sorted(again)
    assert len({answer for answer, _ in calls} & set(AuditConfig().keys)) > 6


async def test_other_mistakes_of_a_judge_have_their_own_advice() -> None:
    def long(solution_str: str) -> float:
        return min(len(solution_str), 25) / 25

    report, findings = await found(long)
    assert {problem.check for problem in report.problems} == {"other_answer"} | {
        name for name, text in findings.items() if text.startswith("problem")
    }
    assert "reference answer" in findings["other_answer"]
    assert findings["again"] == "ok: the same scores"


async def test_scores_that_change_are_a_note() -> None:
    dice = random.Random(0)

    def noisy(solution_str: str, ground_truth: str) -> float:
        return right(solution_str, ground_truth) + 0.01 * dice.random()

    report, findings = await found(noisy)
    assert report.problems == []
    assert findings["again"].startswith("note: 0 of 20 (0%) have the same score, such as 'q0'.")
    _, findings = await found(noisy, audit={"tolerance": 0.1})
    assert findings["again"] == "ok: the same scores"


async def test_a_judge_that_gives_all_answers_the_same_score_is_a_problem() -> None:
    report, findings = await found(lambda solution_str: 1.0)
    assert [problem.check for problem in report.problems] == ["judge"]
    assert "audit.accept" in findings["judge"]
    report, findings = await found(lambda solution_str: 0.0, audit={"accept": 0.5})
    assert report.problems == []


async def test_kinds_without_a_question_are_skipped() -> None:
    samples = [RewardSample(f"It is {i}", ground_truth="4", uid=f"q{i}") for i in range(5)]
    _, findings = await found(right, samples, audit={"probes": ["question", "other_answer", "empty"]})
    assert findings["question"].startswith("skipped: the rows have no prompt")
    assert findings["other_answer"].startswith("skipped: ")
    assert findings["empty"] == "ok: none of 5 accepted"
    assert "cut_off" not in findings


async def test_a_manager_of_groups_is_refused() -> None:
    def ranks(solution_strs: list[str]) -> list[float]:
        return [0.0] * len(solution_strs)

    with pytest.raises(ConfigError, match="--judge"):
        await check(ranks, SAMPLES, manager="group", judge=True)


async def test_labelled_answers_show_the_wrong_ones_that_the_judge_accepts(tmp_path: Path) -> None:
    lines = [{"solution_str": f"It is {i}.", "label": True, "ground_truth": str(i), "uid": f"r{i}"} for i in range(6)]
    near = [
        {"solution_str": f"It is {i + 1}.", "label": False, "ground_truth": str(i), "uid": f"w{i}"} for i in range(6)
    ]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *near]))

    def close(solution_str: str, ground_truth: str) -> float:
        """Accept sums that are off by one, too, but not 5."""
        number = solution_str.rstrip(".").split(" ")[-1]
        return float(number.isdecimal() and number != "5" and int(number) - int(ground_truth) in (0, 1))

    report, findings = await found(close, audit={"labelled": str(tmp_path / "labelled.jsonl")})
    kinds = {kind.name: (kind.asked, kind.positive) for kind in report.probes}
    assert (kinds["labelled, wrong"], kinds["labelled, right"]) == ((6, 5), (6, 5))
    (problem,) = report.problems
    assert problem.check == "labelled, wrong"
    assert problem.text.startswith("the judge accepts 5 of 6 (83%), such as 'w")
    assert findings["labelled, right"] == "note: the judge accepts 5 of 6 (83%); it rejects 'r5'"
    assert findings["spot checks"].startswith("note: the judges differ on 6 of 12 labelled answers")
    assert "Advised: share=0.32" in findings["spot checks"]


async def test_rows_that_a_cheap_and_a_strong_judge_scored_advise_a_share() -> None:
    async def strong(solution_str: str, ground_truth: str) -> float:
        return right(solution_str, ground_truth)

    async def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return (await spot_check(float(bool(solution_str)), strong(solution_str, ground_truth), 1.0)).reward()

    _, findings = await found(compute_score)
    assert "the judges differ on 10 of 20 rows that both scored" in findings["spot checks"]


async def test_components_of_these_names_that_are_no_numbers_advise_nothing() -> None:
    async def compute_score(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": right(solution_str, ground_truth), "cheap": "a small model", "strong": "a large model"}

    _, findings = await found(compute_score)
    assert "spot checks" not in findings


async def test_a_missing_file_of_labelled_answers_is_an_error_before_the_first_call(tmp_path: Path) -> None:
    judge = Gullible("", 0.0)
    with pytest.raises(ConfigError, match=r"audit\.labelled=.*missing\.jsonl"):
        await found(judge, audit={"labelled": str(tmp_path / "missing.jsonl")})
    assert judge.calls == 0


async def test_rows_with_one_question_need_rows_with_other_questions() -> None:
    samples = [replace(sample, prompt="What is 4?") for sample in SAMPLES]
    _, findings = await found(right, samples)
    assert findings["other_answer"] == "skipped: all rows have the same question: add rows with other questions"
