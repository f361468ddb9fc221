"""A reward manager as a reward function of TRL, called as TRL calls it, without TRL."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reward_loop import ConfigError, FunctionLoadError, NaiveRewardLoopManager, RewardFunctionError
from reward_loop.adapters.trl import TRLReward, reward_function
from reward_loop.adapters.trl.reward import RewardLog
from reward_loop.managers.scorer import Scored
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader


async def equals(solution_str: str, ground_truth: str) -> float | None:
    if solution_str == "crash":
        raise ValueError("the judge is broken")
    return None if solution_str == "?" else float(solution_str == ground_truth)


def lengths(solution_strs: list[str], **_: Any) -> list[float]:
    """Score each answer of a group by its share of the group's characters."""
    return [len(text) / sum(map(len, solution_strs)) for text in solution_strs]


class Centred:
    async def compute_score(self, solution_str: str) -> float:
        return float(solution_str)

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return [score - max(scores) for score in scores]


@asynccontextmanager
async def opened(*args: Any, **options: Any) -> AsyncIterator[TRLReward]:
    reward = reward_function(*args, **options)
    try:
        yield reward
    finally:
        await asyncio.to_thread(reward.close)


async def test_scores_come_back_in_order_and_masked_samples_are_none() -> None:
    async with opened(equals, ground_truth="answer") as reward:
        answers = ["4", "4", "crash", "?"]
        rewards = await reward(["2+2="] * 4, ["4", "5", "crash", "?"], answer=answers)
    assert rewards == [1.0, 0.0, None, None]


async def test_the_policies_of_the_options_apply() -> None:
    async with opened(equals, options={"on_failed": "default", "default_score": -1.0}) as reward:
        assert await reward(["p"], ["crash"], ground_truth=["1"]) == [-1.0]
    async with opened(equals, options={"on_failed": "raise"}) as reward:
        with pytest.raises(RewardFunctionError, match="the judge is broken"):
            await reward(["p"], ["crash"], ground_truth=["1"])


async def test_conversational_completions_are_scored_by_their_text() -> None:
    async with opened(equals) as reward:
        prompt = [{"role": "user", "content": "2+2="}]
        assert await reward([prompt], [[{"role": "assistant", "content": "4"}]], ground_truth=["4"]) == [1.0]


async def test_outcomes_and_components_are_logged() -> None:
    metrics: dict[str, float] = {}
    table: dict[str, list[Any]] = {}
    async with opened(equals, name="judge") as reward:
        await reward(
            ["p", "p"],
            ["1", "crash"],
            ground_truth=["1", "1"],
            trainer_state=SimpleNamespace(global_step=6),
            log_metric=metrics.__setitem__,
            log_extra=table.__setitem__,
        )
    assert metrics["reward_loop/judge/scored"] == 1
    assert metrics["reward_loop/judge/failed"] == 1
    assert table["judge/outcome"] == ["scored", "failed"]
    assert "the judge is broken" in table["judge/error"][1]


async def test_the_probes_of_an_audit_are_logged_with_the_next_batch() -> None:
    metrics: dict[str, float] = {}
    options = {"audit": {"share": 1.0, "probes": ["again"]}}
    async with opened(equals, name="judge", options=options) as reward:
        for _ in range(2):
            await reward(["p", "q"], ["1", "2"], ground_truth=["1", "1"], log_metric=metrics.__setitem__)
            agent = reward._owner._agent
            assert agent is not None
            drained = asyncio.run_coroutine_threadsafe(agent.manager.audit.drain(30), agent._loop)
            await asyncio.wrap_future(drained)
    assert metrics["reward_loop/judge/audit/asked"] == 2
    assert metrics["reward_loop/judge/audit/again/agreement"] == 1


async def test_records_have_step_group_and_prompt(tmp_path: Path) -> None:
    async with opened(equals, log_dir=tmp_path) as reward:
        state = SimpleNamespace(global_step=6)
        await reward(["a", "a", "b"], ["1", "2", "3"], ground_truth=["1", "2", "3"], trainer_state=state)
        assert await asyncio.to_thread(records(str(tmp_path)).flush)
    rows = list(RecordsReader(tmp_path).rows())
    assert [row["step"] for row in rows] == [7, 7, 7]
    assert len({row["group"] for row in rows}) == 2
    assert len({row["uid"] for row in rows}) == 3


async def test_a_manager_that_needs_groups_receives_them_whole() -> None:
    async with opened(lengths, manager="group") as reward:
        rewards = await reward(["a", "a", "b", "b"], ["x", "xxx", "xx", "xx"], ground_truth=[""] * 4)
    assert rewards == [0.25, 0.75, 0.5, 0.5]


async def test_scores_of_a_group_are_post_processed() -> None:
    async with opened(Centred, group_size=2) as reward:
        assert await reward(["a"] * 4, ["1", "3", "5", "4"]) == [-2.0, 0.0, 0.0, -1.0]


async def test_several_batches_run_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    async def waits(solution_str: str) -> float:
        await both.wait()
        return 1.0

    async with opened(waits) as reward, asyncio.timeout(30):
        assert await asyncio.gather(reward(["a"], ["x"]), reward(["b"], ["y"])) == [[1.0], [1.0]]


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


async def test_a_wrong_column_is_an_error_before_any_call() -> None:
    async with opened(equals, ground_truth="anwser") as reward:
        with pytest.raises(ConfigError, match=r"no column 'anwser'.*answer"):
            await reward(["p"], ["1"], answer=["1"])


def test_trl_recognises_an_async_function_with_its_name() -> None:
    reward = reward_function(equals)
    assert inspect.iscoroutinefunction(reward.__call__)
    assert reward.__name__ == "equals"
    assert reward_function(f"{__name__}:equals").__name__ == "equals"
    assert reward_function(NaiveRewardLoopManager(compute_score=equals)).__name__ == "equals"


async def test_a_pickled_function_creates_its_own_manager() -> None:
    async with opened(equals, ground_truth="answer", group_size=1) as reward:
        await reward(["p"], ["1"], answer=["1"])
        copy = pickle.loads(pickle.dumps(reward))
        assert await copy(["p"], ["1"], answer=["1"]) == [1.0]
        assert copy._owner._agent.manager is not reward._owner._agent.manager
        await asyncio.to_thread(copy.close)


def test_a_function_with_a_given_manager_cannot_be_pickled() -> None:
    reward = reward_function(NaiveRewardLoopManager(compute_score=equals))
    with pytest.raises(ConfigError, match="cannot be pickled, because it was given a reward manager"):
        pickle.dumps(reward)


async def test_options_beside_a_given_manager_are_an_error() -> None:
    manager = NaiveRewardLoopManager(compute_score=equals)
    async with opened(manager) as reward:
        assert await reward(["p"], ["1"], ground_truth=["1"]) == [1.0]
    with pytest.raises(ConfigError, match="have no effect: NaiveRewardLoopManager is a reward manager already"):
        reward_function(manager, log_dir="records")


def test_mistakes_are_found_before_the_training() -> None:
    with pytest.raises(FunctionLoadError):
        reward_function(f"{__name__}:no_such_function")
    with pytest.raises(ConfigError, match="unknown reward manager 'niave'"):
        reward_function(equals, manager="niave")
    with pytest.raises(ConfigError, match="group_size: at least 1"):
        reward_function(equals, group_size=0)
    with pytest.raises(ConfigError, match="timeuot"):
        reward_function(equals, options={"timeuot": 1})


def test_several_processes_need_one_limiter_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    limits = {"limits": {"default": {"max_concurrent": 8}}}
    with pytest.raises(ConfigError, match="each of the 4 training processes would have limits"):
        reward_function(equals, options=limits)
    reward_function(equals, options={**limits, "job": "127.0.0.1:1"})
    reward_function(equals)


async def test_several_processes_need_the_group_size_if_groups_must_be_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    async with opened(lengths, manager="group") as reward:
        with pytest.raises(ConfigError, match=r"several processes train.*group_size=num_generations"):
            await reward(["a", "a"], ["x", "y"], ground_truth=["", ""])


@pytest.mark.parametrize("kind", ["function", "manager"])
def test_a_function_may_be_used_on_one_event_loop_after_another(kind: str) -> None:
    reward = reward_function(equals if kind == "function" else NaiveRewardLoopManager(compute_score=equals))
    for _ in range(3):
        assert asyncio.run(reward(["p"], ["1"], ground_truth=["1"])) == [1.0]
    with running_loop() as first, running_loop() as second:  # as those of two trainers
        for loop in (first, second, first):
            call = reward(["p"], ["1"], ground_truth=["1"])
            assert asyncio.run_coroutine_threadsafe(call, loop).result(30) == [1.0]
        reward.close()


def test_two_trainers_may_use_a_function_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def waits(solution_str: str) -> float:
        both.wait(30)
        return float(solution_str)

    with running_loop() as first, running_loop() as second, reward_function(waits) as reward:
        calls = [
            asyncio.run_coroutine_threadsafe(reward(["p"], [str(i)]), loop) for i, loop in enumerate((first, second))
        ]
        assert [call.result(30) for call in calls] == [[0.0], [1.0]]


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread, as a trainer's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_close_from_another_thread_closes_the_manager() -> None:
    with running_loop() as loop:
        with reward_function(equals) as reward:
            call = reward(["p"], ["1"], ground_truth=["1"])
            assert asyncio.run_coroutine_threadsafe(call, loop).result(30) == [1.0]
        assert reward._owner._agent is None
        reward.close()  # a second time changes nothing


# --- Metrics and columns


def result(outcome: str = "scored", **info: Any) -> Scored:
    masked = outcome != "scored"
    seconds = {"reward_seconds": 2.0, "reward_error": "broken" if outcome == "failed" else ""}
    extra_info = {"reward_outcome": outcome, "reward_masked": masked, **seconds, **info}
    return Scored.of("a", {"reward_score": 0.0 if masked else 1.0, "reward_extra_info": extra_info})


def test_outcomes_are_counted_and_components_averaged_over_the_samples_that_have_them() -> None:
    results = [result(score=1.0, format=1.0), result(score=0.5, format=False, note="x"), result("failed")]
    assert RewardLog("judge").metrics(results) == {
        "reward_loop/judge/scored": 2,
        "reward_loop/judge/unscored": 0,
        "reward_loop/judge/failed": 1,
        "reward_loop/judge/masked": 1,
        "reward_loop/judge/seconds": 2.0,
        "reward_components/judge/format": 0.5,
    }


def test_a_number_that_is_not_finite_is_not_averaged() -> None:
    metrics = RewardLog("judge").metrics([result(style=float("nan")), result(style=1)])
    assert metrics["reward_components/judge/style"] == 1.0


def test_a_reward_of_another_manager_counts_as_scored() -> None:
    metrics = RewardLog("judge").metrics([Scored.of("a", {"reward_score": 1.0, "reward_extra_info": {}})])
    assert metrics["reward_loop/judge/scored"] == 1
    assert "reward_loop/judge/seconds" not in metrics


def test_each_component_becomes_a_column_of_one_type() -> None:
    log = RewardLog("judge")
    columns = log.columns([result(format=True, words=["a"], why="good"), result("failed")])
    assert columns == {
        "judge/outcome": ["scored", "failed"],
        "judge/error": ["", "broken"],
        "judge/format": [1.0, None],
        "judge/words": ['["a"]', ""],
        "judge/why": ["good", ""],
    }


def test_later_batches_have_the_columns_of_the_first() -> None:
    log = RewardLog("judge")
    first = log.columns([result(format=1.0)])
    assert log.columns([result(style=1.0, format="text")])["judge/format"] == [None]
    assert log.columns([result(style=1.0)]).keys() == first.keys()


def test_nothing_is_logged_where_the_trainer_passes_no_functions() -> None:
    RewardLog("judge").log([result()], None, None)
