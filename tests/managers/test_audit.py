"""`Audit` asks a judge a second time for a share of the samples."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from reward_loop import NaiveRewardLoopManager, RewardLoopConfig, RewardSample
from reward_loop.errors import ConfigError
from reward_loop.managers.audit import MAX_RUNNING, Audit
from reward_loop.records import records


def audited(function: Any, **options: Any) -> NaiveRewardLoopManager:
    options = {"audit": {"reask": 1.0}} | options
    manager = NaiveRewardLoopManager(RewardLoopConfig(**options), compute_score=function)
    manager.audit = Audit(manager.score_one, manager.name, manager.options, manager.needs_group)
    return manager


async def ended(manager: NaiveRewardLoopManager) -> dict[str, Any]:
    """Wait for the second calls, and return their counts."""
    assert manager.audit is not None
    await asyncio.gather(*manager.audit._running, return_exceptions=True)
    return manager.audit.take()


async def test_second_calls_are_compared_with_the_first() -> None:
    numbers = itertools.count()

    async def compute_score(solution_str: str) -> float:
        return 1.0 if solution_str == "same" else float(next(numbers))

    manager = audited(compute_score)
    rewards = [await manager.run_single(RewardSample(text, uid=text)) for text in ("same", "other")]
    assert [reward["reward_score"] for reward in rewards] == [1.0, 0.0]
    assert await ended(manager) == {"asked": 2, "agreed": 1, "without_score": 0, "differences": [0.0, 1.0]}
    assert (await ended(manager))["asked"] == 0


@pytest.mark.parametrize(("tolerance", "agreed"), [(0.0, 0), (0.5, 1), (0.4, 0)])
async def test_scores_agree_within_the_tolerance(tolerance: float, agreed: int) -> None:
    scores = iter([1.0, 1.5])

    async def compute_score(solution_str: str) -> float:
        return next(scores)

    manager = audited(compute_score, audit={"reask": 1.0, "tolerance": tolerance})
    await manager.run_single(RewardSample("a"))
    assert (await ended(manager))["agreed"] == agreed


async def test_a_reward_does_not_wait_for_the_second_call() -> None:
    second = asyncio.Event()
    calls = itertools.count()

    async def compute_score(solution_str: str) -> float:
        if next(calls):
            await second.wait()
        return 1.0

    manager = audited(compute_score)
    assert (await manager.run_single(RewardSample("a")))["reward_score"] == 1.0
    assert manager.audit is not None
    assert manager.audit.take()["asked"] == 0
    second.set()
    assert (await ended(manager))["agreed"] == 1


async def test_close_cancels_the_second_calls() -> None:
    cancelled = asyncio.Event()
    calls = itertools.count()

    async def compute_score(solution_str: str) -> float:
        if next(calls):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return 1.0

    manager = audited(compute_score)
    await manager.run_single(RewardSample("a"))
    await asyncio.sleep(0)  # the second call starts
    assert manager.audit is not None
    manager.audit.close()
    async with asyncio.timeout(10):
        await cancelled.wait()
    assert (await ended(manager))["asked"] == 0


async def test_failed_unscored_and_validation_samples_are_not_asked_again() -> None:
    async def compute_score(solution_str: str) -> float | None:
        if solution_str == "bad":
            raise ValueError("no")
        return None if solution_str == "none" else 1.0

    manager = audited(compute_score)
    for sample in (RewardSample("bad"), RewardSample("none"), RewardSample("good", validate=True)):
        await manager.run_single(sample)
    assert (await ended(manager))["asked"] == 0


async def test_a_second_call_without_a_score_is_counted_apart_and_not_as_a_failed_sample() -> None:
    calls = itertools.count()

    async def compute_score(solution_str: str) -> float:
        if next(calls):
            raise ValueError("no")
        return 1.0

    manager = audited(compute_score, min_samples_for_failed_share=1, max_failed_share=0.0)
    await manager.run_single(RewardSample("a"))
    assert await ended(manager) == {"asked": 1, "agreed": 0, "without_score": 1, "differences": []}


async def test_the_number_of_second_calls_in_flight_is_bounded() -> None:
    release = asyncio.Event()
    seen: set[str] = set()

    async def compute_score(solution_str: str) -> float:
        if solution_str in seen:
            await release.wait()
        seen.add(solution_str)
        return 1.0

    manager = audited(compute_score)
    for number in range(2 * MAX_RUNNING):
        await manager.run_single(RewardSample(str(number)))
    release.set()
    assert (await ended(manager))["asked"] == MAX_RUNNING


async def test_the_share_of_samples_is_that_of_the_option() -> None:
    async def compute_score(solution_str: str) -> float:
        return 1.0

    manager = audited(compute_score, audit={"reask": 0.25})
    assert manager.audit is not None
    manager.audit._random.seed(1)
    for number in range(200):
        await manager.run_single(RewardSample(str(number)))
        await asyncio.sleep(0)
    assert 30 <= (await ended(manager))["asked"] <= 70


async def test_a_row_of_the_records_has_both_scores_and_the_sample_has_one_row(tmp_path: Path) -> None:
    scores = iter([1.0, 3.0])

    async def compute_score(solution_str: str) -> float:
        return next(scores)

    manager = audited(compute_score, log_dir=str(tmp_path))
    await manager.run_single(RewardSample("a", uid="u1", group="g", step=4))
    await ended(manager)
    records(tmp_path).flush()
    records(tmp_path / "audit").flush()
    (path,) = (tmp_path / "audit").glob("*.jsonl")
    (row,) = map(json.loads, path.read_text().splitlines())
    expected = {"kind": "audit", "uid": "u1", "group": "g", "step": 4, "score": 1.0, "second_score": 3.0}
    assert expected.items() <= row.items()
    assert row["agrees"] is False
    rows = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines() if '"u1"' in line]
    assert len([line for line in rows if '"outcome"' in line]) == 1


@pytest.mark.parametrize(
    ("options", "needs_group", "message"),
    [({"cache": {"enabled": True}}, False, "cache"), ({}, True, "compares the samples of a prompt")],
)
def test_an_audit_that_could_not_repeat_a_score_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], needs_group: bool, message: str
) -> None:
    manager = NaiveRewardLoopManager(RewardLoopConfig(**options), compute_score=lambda solution_str: 1.0)
    monkeypatch.setattr(NaiveRewardLoopManager, "needs_group", needs_group)
    with pytest.raises(ConfigError, match=message):
        Audit(manager.score_one, manager.name, manager.options, manager.needs_group)
