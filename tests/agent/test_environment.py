from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import reward_loop
from reward_loop.agent.environment import CurrentScorer
from reward_loop.errors import ConfigError, FunctionLoadError
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader
from reward_loop.types import Reward, RewardSample
from tests.support.clock import hastened


async def length(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    if solution_str == "bad":
        raise ConnectionError("the judge is gone")
    return {"score": len(solution_str), "truth": ground_truth, **extra_info}


async def test_outcomes_are_those_of_run_single() -> None:
    async with reward_loop.scorer(length):
        scored = await reward_loop.score("four", ground_truth="4", extra_info={"turns": 2})
        failed = await hastened(reward_loop.score("bad", ground_truth="4"))
    assert scored["reward_score"] == 4
    info = scored["reward_extra_info"]
    assert (info["reward_outcome"], info["truth"], info["turns"]) == ("scored", "4", 2)
    assert failed["reward_extra_info"]["reward_outcome"] == "failed"
    assert failed["reward_extra_info"]["reward_masked"]
    assert "the judge is gone" in failed["reward_extra_info"]["reward_error"]


async def test_options_hold_for_all_calls_and_samples_are_recorded(tmp_path: Path) -> None:
    running, most = 0, 0

    async def judge(solution_str: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    options = {"limits": {"default": {"max_concurrent": 2}}, "log_dir": str(tmp_path)}
    async with reward_loop.scorer(judge, options), asyncio.TaskGroup() as group:  # as an environment's own tasks
        for number in range(8):
            group.create_task(reward_loop.score("x", uid=f"s{number}", group="g", step=3))
    assert most == 2
    assert await asyncio.to_thread(records(str(tmp_path)).flush)
    rows = list(RecordsReader(tmp_path).rows())
    assert sorted(row["uid"] for row in rows) == [f"s{number}" for number in range(8)]
    assert {(row["group"], row["step"], row["outcome"]) for row in rows} == {("g", 3, "scored")}


async def test_a_manager_without_a_name_scores(tmp_path: Path) -> None:
    source = "class Own:\n    def __init__(self, **_): pass\n"
    source += "    async def run_single(self, data): return {'reward_score': 0.5}"
    (tmp_path / "own.py").write_text(source)
    async with reward_loop.scorer(length, manager=f"{tmp_path}/own.py:Own"):
        assert await reward_loop.score("four") == {"reward_score": 0.5}


async def test_scorers_nest_and_end_with_their_blocks() -> None:
    async with reward_loop.scorer(lambda solution_str: 1.0):
        async with reward_loop.scorer(lambda solution_str: 2.0):
            assert (await reward_loop.score("x"))["reward_score"] == 2
        assert (await reward_loop.score("x"))["reward_score"] == 1
    with pytest.raises(ConfigError, match=r"no scorer is open here: open one with `async with reward_loop\.scorer"):
        await reward_loop.score("x")


async def test_the_rollouts_fields_are_those_of_its_samples() -> None:
    seen: list[RewardSample] = []

    async def score(sample: RewardSample) -> Reward:
        seen.append(sample)
        return {"reward_score": 1.0, "reward_extra_info": {}}

    with CurrentScorer(score, {"uid": "q_0", "group": "q", "step": 5}).in_use():
        await reward_loop.score("x")
        await reward_loop.score("x", uid="q_0.turn1")
    assert [sample.uid for sample in seen] == ["q_0", "q_0.turn1"]
    assert {(sample.group, sample.step) for sample in seen} == {("q", 5)}


async def test_wrong_calls_are_named() -> None:
    async with reward_loop.scorer(length):
        with pytest.raises(ConfigError, match=r"no field question; it has .*ground_truth.*extra_info"):
            await reward_loop.score("x", question="?")
    with pytest.raises(FunctionLoadError):
        async with reward_loop.scorer("no_such_file.py:f"):
            pass
    with pytest.raises(ConfigError, match="timeout"):
        async with reward_loop.scorer(length, {"timeout": -1}):
            pass
