"""verl's own command, unchanged, with a reward manager of this library."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.verl import rewards
from tests.verl.runs import Run, train

pytestmark = pytest.mark.integration

MANAGER = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.module.path=pkg://reward_loop.managers",
    "reward.reward_manager.name=NaiveRewardLoopManager",
)
MAX_CONCURRENT = 2
DEFAULT_SCORE = -0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """One step and one validation: the reward loop is off, and nothing of verl is replaced, but for the CPU."""
    directory = tmp_path_factory.mktemp("stock")
    return train(
        directory,
        tiny_generative_model,
        *MANAGER,
        f"reward.custom_reward_function.path={Path(__file__).with_name('rewards.py')}",
        "reward.custom_reward_function.name=flaky",
        "+reward.custom_reward_function.reward_kwargs.factor=0.5",
        "+reward_loop.isolation=process",
        "+reward_loop.on_failed=default",
        f"+reward_loop.default_score={DEFAULT_SCORE}",
        f"+reward_loop.limits.default.max_concurrent={MAX_CONCURRENT}",
        "+reward_loop.retry.initial_wait=0.01",
        f"+reward_loop.log_dir={directory}/records",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        function="ignored",
        reward_loop=False,
    )


def fails(row: dict[str, Any]) -> bool:
    return rewards.number(row["output"]) % 7 == 1


def expected(row: dict[str, Any]) -> float:
    return DEFAULT_SCORE if fails(row) else 0.5 * (rewards.number(row["output"]) % 100) / 100


def test_the_scores_are_those_of_the_function_and_the_default_for_failures(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    rows = run.rollouts(1)
    assert len(rows) == 8 * 4
    assert [row["score"] for row in rows] == pytest.approx([expected(row) for row in rows])
    validated = run.validation(0)
    # Here, verl replaces the column `score` by the function's own, which failed samples lack.
    assert [row["reward"] for row in validated] == pytest.approx([expected(row) for row in validated])
    mean = statistics.mean(expected(row) for row in validated)
    assert run.steps[0]["val-core/sums/reward/mean@1"] == pytest.approx(mean)


def test_the_limit_and_the_isolation_hold(run: Run) -> None:
    moments = sorted([(call["began"], 1) for call in run.calls] + [(call["ended"], -1) for call in run.calls])
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert 1 <= most <= MAX_CONCURRENT
    assert not any(call["in_ray"] for call in run.calls)
