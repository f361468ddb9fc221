"""A run with an environment of several turns, which asks for its rewards itself: ``examples/guessing``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.counted import rows_that_count
from tests.verl.runs import Run, train

pytestmark = pytest.mark.integration

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    agent = "actor_rollout_ref.rollout.agent"
    return train(
        tmp_path_factory.mktemp("environment"),
        tiny_generative_model,
        "trainer.v1.trainer_mode=reward_pipeline",
        f"trainer.total_training_steps={STEPS[-1]}",
        "trainer.test_freq=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=5",
        "data.max_response_length=128",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "algorithm.norm_adv_by_std_in_grpo=True",
        f"{agent}.agent_loop_config_path={Path(__file__).parents[2] / 'examples/guessing/agent_loop.yaml'}",
        f"{agent}.default_agent_loop=guessing",
        function="of_a_game",
    )


@pytest.fixture(scope="module")
def records(run: Run) -> dict[str, dict[str, Any]]:
    """The record of each rollout by its session."""
    folder = run.directory / "checkpoints" / "rewards"
    rows = [row for row in rows_that_count(folder) if not row["validate"]]
    assert len({row["uid"] for row in rows}) == len(rows)
    return {row["uid"]: row for row in rows}


def sessions(run: Run, step: int) -> dict[str, dict[str, Any]]:
    return {row["uid"].rsplit("_", 1)[0]: row for row in run.rollouts(step)}


def test_every_rollout_is_judged_once_by_the_environment(run: Run, records: dict[str, dict[str, Any]]) -> None:
    trained = [session for step in STEPS for session in sessions(run, step)]
    assert len(set(trained)) == len(trained) == len(STEPS) * 8 * 5
    assert set(trained) <= records.keys()
    calls = [call for call in run.calls if call["split"] == "train"]
    assert len(calls) == sum(row["attempts"] for row in records.values())  # a judge that is gone is asked again
    outcomes = Counter(row["outcome"] for row in records.values())
    assert sum(call["outcome"] == "scored" for call in calls) == outcomes["scored"]
    assert outcomes["failed"] > 0
    assert max(len(call["guesses"]) for call in calls) > 1, "no rollout has several turns"
