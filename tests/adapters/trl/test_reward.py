"""A reward manager as a reward function of TRL, called as TRL calls it, without TRL."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop import (
    ConfigError,
    FunctionLoadError,
    NaiveRewardLoopManager,
    RewardAgent,
    RewardSample,
)
from reward_loop.adapters.trl import TRLReward, reward_function
from reward_loop.adapters.trl.reward import Columns, metrics_of, share_of
from reward_loop.config import RewardLoopConfig
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader
from reward_loop.types import RewardResult
from tests.adapters.services import Centred, ranks, scorer
from tests.scoring.logging_functions import logging_function
from tests.support.gsm8k import ROOT

STATE = SimpleNamespace(global_step=6)


async def equals(solution_str: str, ground_truth: str) -> float | None:
    if solution_str == "crash":
        raise ValueError("the judge is broken")
    return None if solution_str == "?" else float(solution_str == ground_truth)


@asynccontextmanager
async def opened(*args: Any, **options: Any) -> AsyncIterator[TRLReward]:
    reward = reward_function(*args, **options)
    try:
        yield reward
    finally:
        await asyncio.to_thread(reward.close)


async def test_scores_come_back_in_order_and_masked_samples_are_none() -> None:
    chat = [{"role": "assistant", "content": "4"}]
    async with opened(equals, ground_truth="answer") as reward:
        rewards = await reward(["2+2="] * 5, ["4", "5", "crash", "?", chat], answer=["4"] * 5)
    assert rewards == [1.0, 0.0, None, None, 1.0]


async def test_outcomes_are_logged_and_recorded_with_step_and_group(tmp_path: Path) -> None:
    metrics: dict[str, float] = {}
    async with opened(equals, name="judge", log_dir=tmp_path) as reward:
        await reward(
            ["a", "a", "b"],
            ["1", "crash", "3"],
            ground_truth=["1"] * 3,
            trainer_state=STATE,
            log_metric=metrics.__setitem__,
        )
        assert await asyncio.to_thread(records(str(tmp_path)).flush)
    assert (metrics["reward_loop/judge/scored"], metrics["reward_loop/judge/failed"]) == (2, 1)
    rows = list(RecordsReader(tmp_path).rows())
    assert [row["step"] for row in rows] == [7, 7, 7]
    assert (len({row["group"] for row in rows}), len({row["uid"] for row in rows})) == (2, 3)


async def test_a_batch_with_failures_is_one_line_on_the_console(caplog: pytest.LogCaptureFixture) -> None:
    with reward_function(equals, name="judge", options={"max_failed_share": 1.0}) as reward:
        answers = ["1", "crash", "crash", "2"]
        await reward(["p"] * 4, answers, ground_truth=["1"] * 4, trainer_state=STATE)
        (line,) = [record.message for record in caplog.records]
        assert line.startswith("judge, step 7: 2 failed of 4 samples: ValueError in equals (")
        assert "the judge is broken" in line
        await reward(["p"], ["1"], ground_truth=["1"], trainer_state=STATE)
        assert len(caplog.records) == 1


async def test_groups_are_compared_whole() -> None:
    async with opened(ranks, manager="group") as reward:
        assert await reward(["a", "a", "b", "b"], ["x", "xxx", "xx", "x"]) == [0.0, 1.0, 1.0, 0.0]
    async with opened(Centred, group_size=2) as reward:
        assert await reward(["a"] * 4, ["x", "xxx", "xxx", "xxx"]) == [-1.0, 1.0, 0.0, 0.0]


async def test_post_process_scores_gives_the_same_rewards_as_an_agent() -> None:
    texts = ["x", "raise", "xxx", "xx", "raise", "xxxxx"]
    options = {"max_failed_share": 1.0}
    async with RewardAgent(NaiveRewardLoopManager(options, compute_score=Centred), concurrency=1) as agent:
        expected = await agent.submit(map(RewardSample, texts), group_size=3)
    # Fewer samples at a time than a group has: those that wait for their group are not in flight.
    async with opened(Centred, options=options, concurrency=1) as reward:
        scores = await reward(["a"] * 3 + ["b"] * 3, texts)
    assert scores == [-1.0, None, 1.0, -1.5, None, 1.5]
    assert [one["reward_score"] for one in expected] == [score or 0.0 for score in scores]
    assert [one["reward_extra_info"]["reward_masked"] for one in expected] == [score is None for score in scores]


async def test_a_cancelled_batch_cancels_its_calls() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def hangs(solution_str: str) -> float:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    async with opened(hangs) as reward:
        batch = asyncio.create_task(reward(["a"], ["x"]))
        assert await asyncio.to_thread(started.wait, 30)
        batch.cancel()
        assert await asyncio.to_thread(cancelled.wait, 30)
        with pytest.raises(asyncio.CancelledError):
            await batch


def test_trl_recognises_an_async_function_with_its_name() -> None:
    reward = reward_function(equals)
    assert inspect.iscoroutinefunction(reward.__call__)
    assert reward.__name__ == reward_function(f"{__name__}:equals").__name__ == "equals"


async def test_a_pickled_function_creates_its_own_manager() -> None:
    async with opened(equals, ground_truth="answer", group_size=1) as reward:
        await reward(["p"], ["1"], answer=["1"])
        copy = pickle.loads(pickle.dumps(reward))
        await asyncio.to_thread(reward.close)
        assert await copy(["p"], ["1"], answer=["1"]) == [1.0]
        await asyncio.to_thread(copy.close)


@pytest.mark.parametrize(
    ("function", "options", "error"),
    [
        (f"{__name__}:no_such_function", {}, "no_such_function"),
        (equals, {"manager": "niave"}, "unknown reward manager 'niave'"),
        (equals, {"group_size": 0}, "group_size: at least 1"),
        (equals, {"options": {"timeuot": 1}}, "timeuot"),
        (
            equals,
            {"options": {"limits": {"judge": {"max_concurrent": 3}}}},
            "limits.judge.*share of 0.25 allows no call",
        ),
        (equals, {"options": {"budget": {"max_tokens": 3}}}, "budget.max_tokens"),
    ],
)
def test_mistakes_are_found_before_the_training(
    function: Any, options: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises((ConfigError, FunctionLoadError), match=error):
        reward_function(function, **options)


async def test_each_of_several_processes_has_its_share_of_limits_and_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    running = most = 0

    async def counts(solution_str: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return 1.0

    options = {"limits": {"default": {"max_concurrent": 9}}, "budget": {"max_cost": 6, "max_tokens": 9}}
    async with opened(counts, options=options) as reward:
        await reward(["a"] * 8, ["x"] * 8)
    assert most == 2
    shared = share_of(RewardLoopConfig(**options, models={"judge": {"max_concurrent": 9}}), 4)
    assert (shared.budget.max_cost, shared.budget.max_tokens, shared.models["judge"].max_concurrent) == (1.5, 2, 2)


async def test_mistakes_in_the_columns_and_groups_are_found_before_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(equals, ground_truth="anwser") as reward:
        with pytest.raises(ConfigError, match=r"no column 'anwser'.*answer"):
            await reward(["p"], ["1"], answer=["1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    async with opened(ranks, manager="group") as reward:
        with pytest.raises(ConfigError, match=r"several processes train.*group_size=num_generations"):
            await reward(["a", "a"], ["x", "y"])


@pytest.mark.processes
def test_a_forked_process_starts_an_agent_of_its_own() -> None:
    program = f"""
        import asyncio, os
        from reward_loop.adapters.trl import reward_function

        def score(answer):
            return asyncio.run(asyncio.wait_for(reward(["p"], [answer], ground_truth=["4"]), 60))

        reward = reward_function("{__name__}:equals")
        assert score("4") == [1.0]
        child = os.fork()
        assert score("5") == [0.0]
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_close_while_the_agent_starts_leaves_it_to_the_next_close() -> None:
    started, close_first = threading.Event(), threading.Event()

    def load() -> Any:
        started.set()
        close_first.wait(30)
        return scorer()

    reward = TRLReward("equals", load, Columns())
    scoring = asyncio.create_task(reward(["p"], ["4"], ground_truth=["4"]))
    await asyncio.to_thread(started.wait, 30)
    reward.close()
    close_first.set()
    assert await scoring == [1.0]
    await asyncio.to_thread(reward.close)
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-agent"]


def test_calls_may_come_from_several_event_loops_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def waits(solution_str: str) -> float:
        both.wait(30)
        return float(solution_str)

    with reward_function(waits) as reward, ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(lambda text=text: asyncio.run(reward(["p"], [text]))) for text in "01"]  # type: ignore[misc]
        assert [call.result(60) for call in calls] == [[0.0], [1.0]]
        reward.close()
        reward.close()  # a second time changes nothing


# --- Metrics


def result(outcome: str = "scored", **info: Any) -> RewardResult:
    masked = outcome != "scored"
    seconds = {"reward_work_s": 2.0, "reward_total_s": 2.5, "reward_error": "broken" if outcome == "failed" else ""}
    extra_info = {"reward_outcome": outcome, "reward_masked": masked, **seconds, **info}
    return RewardResult.of({"reward_score": 0.0 if masked else 1.0, "reward_extra_info": extra_info}, "a")


def test_outcomes_are_counted_and_finite_components_averaged_over_the_samples_that_have_them() -> None:
    results = [
        result(score=1.0, format=1.0, style=float("nan")),
        result(score=0.5, format=False, note="x", style=1),
        result("failed"),
    ]
    assert metrics_of("judge", results) == {
        "reward_loop/judge/scored": 2,
        "reward_loop/judge/unscored": 0,
        "reward_loop/judge/failed": 1,
        "reward_loop/judge/masked": 1,
        "reward_loop/judge/work_s": 2.0,
        "reward_components/judge/format": 0.5,
        "reward_components/judge/style": 1.0,
    }


def test_a_reward_of_another_manager_counts_as_scored() -> None:
    metrics = metrics_of("judge", [RewardResult.of({"reward_score": 1.0, "reward_extra_info": {}})])
    assert metrics["reward_loop/judge/scored"] == 1
    assert "reward_loop/judge/work_s" not in metrics


ASKED = {
    "prompt": "2+2=",
    "response_ids": [19, 2, 2],
    "response_length": 3,
    "is_truncated": True,
    "global_steps": 7,
    "training_progress": 0.7,
    "validate": True,
}


@pytest.mark.parametrize("name", ASKED)
async def test_functions_get_the_arguments_that_they_ask_for(name: str) -> None:
    seen: list[Any] = []
    function = logging_function(name, seen)
    state = SimpleNamespace(global_step=6, max_steps=10)
    async with opened(function, max_completion_length=3) as reward:
        rewards = await reward(["2+2="], ["4"], [[19, 2, 2]], trainer_state=state, validate=[True])
    assert (rewards, seen) == ([1.0], [ASKED[name]])


async def test_functions_with_kwargs_get_what_trl_passes_for_a_completion() -> None:
    seen: list[dict[str, Any]] = []

    def compute_score(solution_str: str, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 1.0

    state, environments = SimpleNamespace(global_step=6, max_steps=10), [SimpleNamespace(), SimpleNamespace()]
    async with opened(compute_score, concurrency=1) as reward:
        given = {"environments": environments, "trainer_state": state, "ground_truth": ["1", "2"], "level": [3, 4]}
        await reward(["a", "b"], ["x", "y"], [[5], [6]], **given)  # type: ignore[arg-type]
    assert [call["trainer_state"] for call in seen] == [state, state]
    assert [[id(one) for one in call["environments"]] for call in seen] == [[id(one)] for one in environments]
    assert [(call["prompts"], call["completions"], call["completion_ids"]) for call in seen] == [
        (["a"], ["x"], [[5]]),
        (["b"], ["y"], [[6]]),
    ]
    assert [(call["ground_truth"], call["extra_info"]) for call in seen] == [("1", {"level": 3}), ("2", {"level": 4})]


async def test_what_trl_does_not_pass_is_named_before_the_first_reward() -> None:
    with pytest.raises(ConfigError, match="set max_completion_length"):
        reward_function(lambda is_truncated: 1.0)
    async with opened(lambda validate: 1.0) as reward:
        with pytest.raises(ConfigError, match="no column 'validate', which is required"):
            await reward(["p"], ["x"])
    with pytest.raises(ConfigError, match="skip_special_tokens=False has an effect only in a verl run"):
        async with opened(lambda solution_str: 1.0, options={"skip_special_tokens": False}) as reward:
            await reward(["p"], ["x"])
