"""A run with an environment of several turns, which asks for its rewards itself: ``examples/guessing``."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
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


def test_failures_leave_baseline_and_advantage(run: Run, records: dict[str, dict[str, Any]]) -> None:
    for step in STEPS:
        scores: dict[str, dict[str, float]] = defaultdict(dict)
        outcomes: Counter[str] = Counter()
        for session in sessions(run, step):
            row = records[session]
            outcomes[row["outcome"]] += 1
            if row["outcome"] == "scored":
                scores[row["group"]][session] = row["score"]
        expected = {}
        for group in scores.values():
            if len(group) > 1:
                mean, deviation = statistics.mean(group.values()), statistics.stdev(group.values())
                expected |= {session: (score - mean) / (deviation + 1e-6) for session, score in group.items()}
        recorded = {session: records[session].get("advantage") for session in sessions(run, step)}
        assert {k: v for k, v in recorded.items() if v is not None} == pytest.approx(expected, abs=1e-4)
        metrics = run.steps[step]
        assert metrics["critic/advantages/max"] == pytest.approx(max(expected.values()), abs=1e-4)
        assert metrics["reward_loop/failed"] == outcomes["failed"]
        assert metrics["reward_loop/scored"] == outcomes["scored"]
