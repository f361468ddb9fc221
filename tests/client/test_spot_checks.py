from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.client import Judge, Judgement, Number, spot_check
from reward_loop.client.panel import drawn
from reward_loop.config import RetryConfig
from reward_loop.errors import ConfigError
from reward_loop.records import ActiveBatch, ActiveSample
from reward_loop.testing import FakeJudge, Status
from reward_loop.types import RewardResult

CHECKED = next(f"uid{i}" for i in range(99) if drawn(f"uid{i}", 0) < 0.2)
UNCHECKED = next(f"uid{i}" for i in range(99) if drawn(f"uid{i}", 0) >= 0.2)


async def scored(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def names(count: int, checked: bool, share: float = 0.2) -> list[str]:
    """Uids of samples of step 3 that are checked, or are not."""
    return [uid for i in range(20 * count) if (drawn(f"{(uid := f's{i}')}\n3", 0) < share) == checked][:count]


async def results_of(function: Any, uids: Sequence[str], **options: Any) -> list[RewardResult]:
    manager = NaiveRewardLoopManager(RewardLoopConfig(**options), compute_score=function)
    return [await manager.score(RewardSample("4", uid=uid, generated_step=3)) for uid in uids]


async def test_a_checked_sample_is_corrected_and_others_keep_the_cheap_score() -> None:
    checked = await spot_check(scored(1.0), scored(0.0), uid=CHECKED)
    assert checked.score == pytest.approx(-4.0)
    expected = {"cheap": 1.0, "strong": 0.0, "chance": 0.2, "judged_by": "strong"}
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
    assert (reward["judged_by"], reward["extra"]) == ("strong", 1)


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
        strong.script(Status(401), "I cannot say.", "I cannot.")
        failures = await results_of(compute_score, [uid, uid])
        assert [(result.outcome, result.score) for result in failures] == [("failed", None)] * 2
        assert "the strong judge gave no verdict" in str(failures[1].error)
        strong.script(Status(429, 0.01), "Score: 1")  # called again, and checked again
        (result,) = await results_of(compute_score, [uid], retry=RetryConfig(max_attempts=2, initial_wait=0.01))
        assert (result.extra_info["judged_by"], result.attempts) == ("strong", 2)


async def test_a_sample_without_a_verdict_of_the_cheap_judge_is_unscored() -> None:
    without = Judgement(None, None, "", (await spot_check(1, scored(1), uid=UNCHECKED)).reply, "no verdict")
    for uid in (CHECKED, UNCHECKED):
        assert (await spot_check(without, scored(1.0), uid=uid)).unscored == "no verdict"


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
async def test_an_invalid_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"share={share}"):
        await spot_check(1.0, scored(1.0), share)


@pytest.mark.parametrize(
    "active", [ActiveBatch([ActiveSample(RewardSample("4", uid="a"), "f")]), ActiveSample(RewardSample("4"), "f")]
)
async def test_samples_without_a_single_uid_need_a_name(active: Any) -> None:
    with pytest.raises(ConfigError, match="pass the uid of each"), active:
        await spot_check(1.0, scored(1.0))
