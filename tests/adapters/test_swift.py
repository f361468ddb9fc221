"""The reward for ms-swift, with a stand-in for its module and the columns that it passes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from reward_loop.adapters.process_agent import close_agent
from reward_loop.adapters.swift import register, score_completions
from reward_loop.errors import ConfigError
from reward_loop.records import records
from reward_loop.records.reader import RecordsReader
from tests.adapters.rewards import FUNCTION

OPTIONS = {"function": FUNCTION}
GROUPS = {"function": FUNCTION.replace("compute_score", "rank"), "manager": "group"}


def columns(count: int, **own: Any) -> dict[str, Any]:
    """The columns that ms-swift 4.6 passes, and those of the data set."""
    return {
        "trainer_state": SimpleNamespace(global_step=3),
        "messages": [[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "?"}]] * count,
        "prompt_id": [f"prompt_{i % 2}" for i in range(count)],
        "request_id": [f"chatcmpl-{i}" for i in range(count)],
        "finish_reason": ["stop"] * count,
        "response_token_ids": [[[1, 2]]] * count,
        "rollout_infos": [{}] * count,
        **own,
    }


@pytest.fixture
def orms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of rewards of a module ``swift.rewards``, whose base class is that of ms-swift 4.6."""

    class AsyncORM:
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            self.args = args

    rewards = ModuleType("swift.rewards")
    rewards.AsyncORM, rewards.orms = AsyncORM, {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.rewards", rewards)
    return rewards.orms  # type: ignore[attr-defined, no-any-return]


def test_a_registered_reward_scores_batches_on_an_event_loop_each(orms: dict[str, Any]) -> None:
    register(config=OPTIONS)
    reward = orms["reward_loop"](args=SimpleNamespace(num_generations=2))
    # ms-swift calls asyncio.run for each batch, if this holds.
    assert asyncio.iscoroutinefunction(reward.__call__)

    async def batch(*completions: str) -> list[float | None]:
        given = columns(len(completions), solution=["4"] * len(completions))
        [scores] = await asyncio.gather(reward(list(completions), **given))
        return scores

    assert asyncio.run(batch("4", "5")) == [1.0, 0.0]
    assert asyncio.run(batch("none", "4", "fail", "4")) == [None, 1.0, None, 1.0]


async def test_the_columns_of_the_data_set_are_the_extra_info() -> None:
    options = {"function": FUNCTION.replace("compute_score", "columns_of")}
    given = columns(2, solution=["4"] * 2, data_source=["sums", "other"])
    assert await score_completions(["4", "5"], given, options) == [1.0, 0.0]


async def test_the_ground_truth_may_be_another_column() -> None:
    given = columns(1, answer=["4"])
    with pytest.raises(ConfigError, match=r"no field 'solution': set `ground_truth` .*answer"):
        await score_completions(["4"], given, OPTIONS)
    close_agent()
    assert await score_completions(["4"], given, {**OPTIONS, "ground_truth": "answer"}) == [1.0]


async def test_the_length_of_a_response_is_the_number_of_its_tokens_in_all_turns(tmp_path: Path) -> None:
    options = {**OPTIONS, "reward_loop": {"log_dir": str(tmp_path)}}
    tokens = [[1, 2, 3], [[1, 2], [3, 4, 5]], []]
    await score_completions(["4"] * 3, columns(3, solution=["4"] * 3, response_token_ids=tokens), options)
    await asyncio.to_thread(records(str(tmp_path)).flush)
    lengths = {row["uid"]: row["response_length"] for row in RecordsReader(tmp_path).rows()}
    assert lengths == {"chatcmpl-0": 3, "chatcmpl-1": 5, "chatcmpl-2": None}


async def test_the_step_is_the_one_that_trains_on_the_completions(tmp_path: Path) -> None:
    options = {**OPTIONS, "reward_loop": {"log_dir": str(tmp_path)}}
    await score_completions(["4"], columns(1, solution=["4"]), options)  # after 3 steps, as the trainer counts them
    await asyncio.to_thread(records(str(tmp_path)).flush)
    assert [row["step"] for row in RecordsReader(tmp_path).rows()] == [4]


async def test_completions_of_a_prompt_are_compared_in_any_order() -> None:
    # The completions of the two prompts alternate.
    completions = ["aa", "b", "a", "bbb", "aaa", "bb"]
    args = SimpleNamespace(num_generations=3, num_generations_eval=None)
    assert await score_completions(completions, columns(6), GROUPS, args) == [0.5, 0.0, 0.0, 1.0, 1.0, 0.5]


async def test_a_part_of_a_group_is_not_compared() -> None:
    args = SimpleNamespace(num_generations=4, num_generations_eval=2)
    # Every group of an evaluation has `num_generations_eval` completions.
    assert await score_completions(["a", "a", "aa", "aa"], columns(4), GROUPS, args) == [0.0, 0.0, 1.0, 1.0]
    for prompts, part in (("aaabbb", 3), ("aaaabb", 2), ("aaaaaabb", 6)):
        given = columns(len(prompts), prompt_id=list(prompts))
        with pytest.raises(ConfigError, match=rf"has {part} of 4: .*multiple of num_generations"):
            await score_completions(["a"] * len(prompts), given, GROUPS, args)
    given = columns(4, prompt_id=None)
    with pytest.raises(ConfigError, match="no prompt_id"):
        await score_completions(["a"] * 4, given, GROUPS, args)


async def test_post_process_scores_receives_whole_groups() -> None:
    options = {"function": FUNCTION.replace("compute_score", "Centred")}
    args = SimpleNamespace(num_generations=2)
    # Columns 0 and 2 have one prompt, 1 and 3 the other.
    assert await score_completions(["a", "b", "aaa", "bbbbb"], columns(4), options, args) == [-1, -2, 1, 2]
    with pytest.raises(ConfigError, match="post_process_scores"):
        await score_completions(["a", "b"], columns(2), options, args)
