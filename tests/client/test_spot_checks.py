from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Judgement, Number, escalate, spot_check
from reward_loop.client.spot_checks import chances, drawn
from reward_loop.config import BudgetConfig, LimitConfig, RetryConfig
from reward_loop.errors import ConfigError, ServerError
from reward_loop.managers import GroupRewardLoopManager
from reward_loop.records.reader import read_rows
from reward_loop.testing import FakeJudge, Status
from reward_loop.types import RewardResult

CHECKED = next(f"uid{i}" for i in range(99) if drawn(f"uid{i}", 0) < 0.2)
UNCHECKED = next(f"uid{i}" for i in range(99) if drawn(f"uid{i}", 0) >= 0.2)


async def scored(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def failing(error: Exception) -> Any:
    raise error


def names(count: int, checked: bool, share: float = 0.2) -> list[str]:
    """Uids of samples of step 3 that are checked, or are not."""
    return [uid for i in range(20 * count) if (drawn(f"{(uid := f's{i}')}\n3", 0) < share) == checked][:count]


async def results_of(function: Any, uids: Sequence[str], **options: Any) -> list[RewardResult]:
    manager = NaiveRewardLoopManager(RewardLoopConfig(**options), compute_score=function)
    return [await manager.score(RewardSample("4", uid=uid, generated_step=3)) for uid in uids]


async def test_a_checked_sample_is_corrected_and_others_keep_the_cheap_score() -> None:
    checked = await spot_check(scored(1.0), scored(0.0), uid=CHECKED)
    assert checked.score == pytest.approx(-4.0)
    expected = {"cheap": 1.0, "strong": 0.0, "chance": 0.2, "judged_by": "strong", "false_accept": 1.0}
    assert checked.components == expected
    other = await spot_check(scored(1.0), scored(0.0), uid=UNCHECKED)
    assert (other.score, other.components) == (1.0, {"cheap": 1.0, "chance": 0.2, "judged_by": "cheap"})
    assert (await spot_check(0.0, scored(1.0), uid=CHECKED)).score == pytest.approx(5.0)


async def test_scores_may_be_judgements_or_what_a_reward_function_returns() -> None:
    strong = {"score": 0.25, "explanation": "Three steps are missing.", "verdict": "2 of 8"}
    judgement = await spot_check({"score": 1, "acc": 1}, lambda: scored(strong), 0.5, uid=CHECKED)
    assert (judgement.score, judgement.verdict) == (-0.5, "2 of 8")
    assert "[strong]\nThree steps are missing." in judgement.reply.text
    reward = judgement.reward(extra=1)
    assert (reward["judged_by"], reward["false_accept"], reward["extra"]) == ("strong", 1.0, 1)


async def test_the_mean_of_the_rewards_is_that_of_the_strong_judge_whatever_the_cheap_one_says() -> None:
    generator = random.Random(1)
    pairs = [(float(generator.random() < 0.9), float(generator.random() < 0.4)) for _ in range(8000)]
    rewards = [(await spot_check(c, scored(s), uid=str(i))).reward() for i, (c, s) in enumerate(pairs)]
    assert {reward["chance"] for reward in rewards} == {0.2}
    assert fmean("strong" in reward for reward in rewards) == pytest.approx(0.2, abs=0.015)
    # Four standard errors; the cheap judge's mean is 0.5 higher.
    noise = 4 * (fmean((c - s) ** 2 for c, s in pairs) * 0.8 / 0.2 / len(pairs)) ** 0.5
    assert fmean(reward["score"] for reward in rewards) == pytest.approx(fmean(s for _, s in pairs), abs=noise)


async def test_the_strong_judge_is_asked_for_the_chosen_samples_only_and_the_choice_can_be_repeated() -> None:
    async with FakeJudge("Score: 9") as cheap, FakeJudge("Score: 1") as strong:
        judge = Judge("{{answer}}", Number(1, 10, scaled=True))

        async def compute_score(solution_str: str) -> dict[str, Any]:
            asked = judge(cheap.address, answer=solution_str), judge(strong.address, answer=solution_str)
            return (await spot_check(*asked)).reward()

        uids = [*names(3, True), *names(3, False)]
        first = await results_of(compute_score, uids)
        assert [result.extra_info["judged_by"] for result in first] == ["strong"] * 3 + ["cheap"] * 3
        assert (len(cheap.requests), len(strong.requests)) == (6, 3)
        again = await results_of(compute_score, uids)
    assert [result.score for result in again] == [result.score for result in first]


async def test_another_step_or_seed_chooses_other_samples() -> None:
    async def choices(seed: int, step: int) -> list[bool]:
        async def compute_score(solution_str: str) -> dict[str, Any]:
            return (await spot_check(1.0, scored(1.0), seed=seed)).reward()

        manager = NaiveRewardLoopManager(compute_score=compute_score)
        samples = [RewardSample("", uid=f"row {i}", step=step) for i in range(64)]
        return [(await manager.score(sample)).extra_info["judged_by"] == "strong" for sample in samples]

    first = await choices(0, 1)
    assert first == await choices(0, 1)
    assert first != await choices(0, 2)
    assert first != await choices(1, 1)


async def test_a_checked_sample_never_gets_the_cheap_score_when_its_strong_judge_fails() -> None:
    async with FakeJudge() as strong:
        judge = Judge("{{answer}}", Number(1, 10), address=strong.address)

        async def compute_score(solution_str: str) -> dict[str, Any]:
            return (await spot_check(1.0, judge(answer=solution_str))).reward()

        (uid,) = names(1, True)
        strong.script(Status(401), "I cannot say.")
        failures = await results_of(compute_score, [uid, uid])
        assert [(result.outcome, result.score) for result in failures] == [("failed", None)] * 2
        assert "the strong judge gave no verdict" in str(failures[1].error)
        strong.script(Status(429, 0.01), "Score: 1")  # called again, and checked again
        (result,) = await results_of(compute_score, [uid], retry=RetryConfig(max_attempts=2, initial_wait=0.01))
        assert (result.extra_info["judged_by"], result.attempts) == ("strong", 2)


async def test_a_checked_sample_without_budget_has_no_score() -> None:
    async with FakeJudge("Score: 1") as strong:
        judge = Judge("{{answer}}", Number(1, 10), address=strong.address, limit="strong")

        async def compute_score(solution_str: str) -> dict[str, Any]:
            return (await spot_check(1.0, judge(answer=solution_str))).reward()

        options = {"budget": BudgetConfig(max_tokens=1, at_cap="mask"), "limits": {"strong": LimitConfig()}}
        results = await results_of(compute_score, names(3, True), **options)
    assert results[0].score is not None
    assert [result.score for result in results[1:]] == [None, None]


async def test_a_sample_without_a_verdict_of_the_cheap_judge_is_unscored() -> None:
    without = Judgement(None, None, "", (await spot_check(1, scored(1), uid=UNCHECKED)).reply, "no verdict")
    for uid in (CHECKED, UNCHECKED):
        assert (await spot_check(without, scored(1.0), uid=uid)).unscored == "no verdict"


async def test_the_first_error_of_a_judge_cancels_the_other_one() -> None:
    cancelled = asyncio.Event()

    async def slow() -> float:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    for asked in ((slow(), failing(ServerError("down"))), (failing(ServerError("down")), slow())):
        cancelled.clear()
        with pytest.raises(ServerError, match="down"):
            await spot_check(*asked, uid=CHECKED)
        assert cancelled.is_set()


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan"), 0.149])
async def test_shares_with_too_much_variance_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"share={share}"):
        await spot_check(1.0, scored(1.0), share)


async def test_a_small_share_may_be_asked_for() -> None:
    uid = next(f"uid{i}" for i in range(999) if drawn(f"uid{i}", 0) < 0.05)
    judged = await spot_check(1.0, scored(0.0), 0.05, allow_small_share=True, uid=uid)
    assert judged.score == pytest.approx(-19.0)


async def test_a_strong_judge_that_runs_already_is_refused() -> None:
    running = asyncio.ensure_future(scored(1.0))
    with pytest.raises(ConfigError, match="runs already"):
        await spot_check(1.0, running)
    await running


async def test_a_sample_without_a_uid_keeps_its_choice_when_the_function_is_called_again() -> None:
    choices: dict[str, list[bool]] = {}

    async def compute_score(solution_str: str) -> float:
        chosen = "strong" in (await spot_check(1.0, scored(1.0))).components
        choices.setdefault(solution_str, []).append(chosen)
        if len(choices[solution_str]) < 3:
            raise ConnectionError
        return 1.0

    options = RewardLoopConfig(retry=RetryConfig(max_attempts=3, initial_wait=0.001))
    manager = NaiveRewardLoopManager(options, compute_score=compute_score)
    await asyncio.gather(*(manager.score(RewardSample(str(i))) for i in range(40)))
    assert Counter(len(set(made)) for made in choices.values()) == {1: 40}
    assert {made[0] for made in choices.values()} == {True, False}


def test_the_chance_of_a_key_grows_with_its_answers_and_the_calls_stay_within_the_share() -> None:
    assert chances([1] * 8, 0.2) == pytest.approx([0.2] * 8)  # nothing repeats: as spot checks
    assert chances([5, 2, 1], 0.2) == pytest.approx([1, 0.4, 0.2])
    assert chances([1, 7], 0.2) == pytest.approx([0.6, 1])
    assert chances([6, 1, 1], 0.5) == [1, 1, 1]
    generator = random.Random(0)
    for _ in range(500):
        counts = [generator.randint(1, 6) for _ in range(generator.randint(1, 9))]
        share = generator.uniform(0.01, 1)
        found = chances(counts, share)
        assert sum(found) == pytest.approx(min(len(counts), share * sum(counts)))
        assert share * 0.999 <= min(found) <= max(found) <= 1


def group(answers: Sequence[str], number: int = 0) -> list[RewardSample]:
    return [
        RewardSample(answer, uid=f"{number}_{i}", group=str(number), group_size=len(answers))
        for i, answer in enumerate(answers)
    ]


async def group_results(function: Any, samples: Sequence[RewardSample], **options: Any) -> list[RewardResult]:
    manager = GroupRewardLoopManager(RewardLoopConfig(**options), compute_score=function)
    return await asyncio.gather(*(manager.score(sample) for sample in samples))


def last_word(answer: str) -> str | None:
    return answer.split()[-1] if answer.split() else None


async def test_equal_answers_of_a_group_share_one_call_of_the_strong_judge() -> None:
    asked: list[str] = []

    async def strong(answer: str) -> float:
        asked.append(answer)
        return float(answer.endswith("4"))

    async def compute_score(solution_strs: list[str]) -> list[Any]:
        return await escalate(solution_strs, lambda answer: 1.0, strong, key=last_word, share=0.25)

    results = await group_results(compute_score, group(["It is 4", "so 4", "5", "4", "5", "4", "4", "thus 5"]))
    assert asked == ["It is 4", "5"]  # two calls for eight answers suffice for all keys
    assert [result.score for result in results] == [1, 1, 0, 1, 0, 1, 1, 0]
    assert results[2].extra_info["false_accept"] == 1.0


async def test_the_mean_over_groups_is_that_of_the_strong_judge() -> None:
    generator = random.Random(2)
    scores, truth, calls = [], [], 0

    def strong(answer: str) -> float:
        nonlocal calls
        calls += 1
        return float(answer in "ab")

    for number in range(1500):
        answers = generator.choices("abcdef", [4, 1, 1, 1, 1, 1], k=8)
        uids = [f"{number}_{i}" for i in range(8)]
        rewards = await escalate(answers, lambda _: 1.0, strong, key=str, share=0.2, uids=uids)
        scores += [reward["score"] for reward in rewards if isinstance(reward, dict)]
        truth += [float(answer in "ab") for answer in answers]
    assert len(scores) == 12000
    assert calls / len(scores) == pytest.approx(0.2, abs=0.01)
    assert fmean(scores) == pytest.approx(fmean(truth), abs=0.05)  # the cheap judge's mean is 1, that is 0.45 more


async def test_the_order_of_a_group_does_not_change_what_is_checked() -> None:
    async def compute_score(solution_strs: list[str]) -> list[Any]:
        return await escalate(solution_strs, lambda _: 1.0, lambda _: 0.0, key=last_word, share=0.5)

    samples = group(["1", "2", "3", "4", "4", "5"])
    first = await group_results(compute_score, samples)
    again = await group_results(compute_score, samples[::-1])
    assert [result.score for result in again[::-1]] == [result.score for result in first]
    assert len({result.score for result in first}) > 1


async def test_answers_without_a_key_are_equal_to_no_other() -> None:
    asked: list[str] = []

    async def strong(answer: str) -> float:
        asked.append(answer)
        return 1.0

    await escalate(["", "", "7", "7"], lambda _: 1.0, strong, key=last_word, share=1.0)
    assert asked == ["", "", "7"]


async def test_only_the_answers_whose_strong_judge_failed_have_no_score_and_transient_errors_are_raised() -> None:
    def strong(answer: str) -> float | None:
        if answer == "5":
            raise ServerError("refused")
        return None if answer == "6" else 1.0

    async def compute_score(solution_strs: list[str]) -> list[Any]:
        return await escalate(solution_strs, lambda _: 1.0, strong, key=str, share=1.0)

    results = await group_results(compute_score, group(["4", "5", "6", "5"]))
    assert [result.score for result in results] == [1.0, None, None, None]
    assert {result.outcome for result in results[1:]} == {"failed"}
    with pytest.raises(ConnectionError):
        await escalate(["4"], lambda _: 1.0, lambda _: failing(ConnectionError()), key=str, share=1.0)


@pytest.mark.parametrize("lacking", [{"error": "its row is invalid"}, {"prompt": None}])
async def test_samples_that_the_function_does_not_receive_do_not_move_the_names_of_others(lacking: Any) -> None:
    async def compute_score(solution_strs: list[str], prompts: list[str]) -> list[Any]:
        return await escalate(solution_strs, lambda _: 1.0, lambda _: 0.0, key=last_word, share=0.5)

    samples = [replace(sample, prompt="2+2") for sample in group([str(i) for i in range(8)])]
    whole = await group_results(compute_score, samples)
    part = await group_results(compute_score, [replace(samples[0], **lacking), *samples[1:]])
    assert [result.score for result in part[1:]] == [result.score for result in whole[1:]]


async def test_a_function_of_several_samples_needs_their_names() -> None:
    async def compute_score(solution_strs: list[str]) -> list[Any]:
        return [(await spot_check(1.0, scored(1.0))).reward() for _ in solution_strs]

    with pytest.raises(ConfigError, match="use escalate"):
        await group_results(compute_score, group(["4"]))
    with pytest.raises(ConfigError, match="2 answers, and 1 uids"):
        await escalate(["4", "5"], lambda _: 1.0, lambda _: 0.0, key=str, uids=["one"])


async def test_the_record_has_what_the_reward_was_made_of(tmp_path: Path) -> None:
    async def compute_score(solution_str: str) -> dict[str, Any]:
        return (await spot_check(1.0, scored(0.0))).reward()

    uids = [*names(1, True), *names(1, False)]
    await results_of(compute_score, uids, log_dir=str(tmp_path))
    rows = {row["uid"]: row for row in read_rows(tmp_path)}
    for row in rows.values():
        made = row["components"]
        again = made["cheap"] + (made["strong"] - made["cheap"]) / made["chance"] if "strong" in made else made["cheap"]
        assert row["score"] == pytest.approx(again)
        chosen = drawn(f"{row['uid']}\n{row['generated_step']}", 0) < made["chance"]
        assert chosen == (made["judged_by"] == "strong")
