"""The metrics and columns that a reward function logs through TRL."""

from __future__ import annotations

from typing import Any

from reward_loop.adapters.trl.reward_log import RewardLog
from reward_loop.types import Reward


def reward(outcome: str = "scored", **info: Any) -> Reward:
    masked = outcome != "scored"
    seconds = {"reward_seconds": 2.0, "reward_error": "broken" if outcome == "failed" else ""}
    return {
        "reward_score": 0.0 if masked else 1.0,
        "reward_extra_info": {"reward_outcome": outcome, "reward_masked": masked, **seconds, **info},
    }


def test_outcomes_are_counted_and_components_averaged_over_the_samples_that_have_them() -> None:
    rewards = [reward(score=1.0, format=1.0), reward(score=0.5, format=False, note="x"), reward("failed")]
    assert RewardLog("judge").metrics(rewards) == {
        "reward_loop/judge/scored": 2,
        "reward_loop/judge/unscored": 0,
        "reward_loop/judge/failed": 1,
        "reward_loop/judge/masked": 1,
        "reward_loop/judge/seconds": 2.0,
        "reward_components/judge/format": 0.5,
    }


def test_a_number_that_is_not_finite_is_not_averaged() -> None:
    metrics = RewardLog("judge").metrics([reward(style=float("nan")), reward(style=1)])
    assert metrics["reward_components/judge/style"] == 1.0


def test_a_reward_of_another_manager_counts_as_scored() -> None:
    metrics = RewardLog("judge").metrics([{"reward_score": 1.0, "reward_extra_info": {}}])
    assert metrics["reward_loop/judge/scored"] == 1
    assert "reward_loop/judge/seconds" not in metrics


def test_each_component_becomes_a_column_of_one_type() -> None:
    log = RewardLog("judge")
    columns = log.columns([reward(format=True, words=["a"], why="good"), reward("failed")])
    assert columns == {
        "judge/outcome": ["scored", "failed"],
        "judge/error": ["", "broken"],
        "judge/format": [1.0, None],
        "judge/words": ['["a"]', ""],
        "judge/why": ["good", ""],
    }


def test_later_batches_have_the_columns_of_the_first() -> None:
    log = RewardLog("judge")
    first = log.columns([reward(format=1.0)])
    assert log.columns([reward(style=1.0, format="text")])["judge/format"] == [None]
    assert log.columns([reward(style=1.0)]).keys() == first.keys()


def test_nothing_is_logged_where_the_trainer_passes_no_functions() -> None:
    RewardLog("judge").log([reward()], None, None)
