"""verl's trainer mode ``separate_async`` on a CPU: rollouts and training in different places, both at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.verl import rewards
from tests.verl.runs import Run, train

pytestmark = pytest.mark.integration

STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """The first batch is judged only after some of the second has been generated."""
    return train(
        tmp_path_factory.mktemp("separate"),
        tiny_generative_model,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"trainer.total_training_steps={len(STEPS)}",
        "trainer.val_before_train=False",
        function="Overtaken",
    )


def test_generation_goes_on_while_a_batch_is_judged(run: Run) -> None:
    assert run.returncode == 0, run.output[-8000:]
    for step in STEPS:
        numbers = [rewards.number(row["output"]) for row in run.rollouts(step)]
        assert len(numbers) == 8 * 4
        assert run.steps[step]["reward_loop/failed"] == sum(n % 7 == 1 for n in numbers), "a judge waited in vain"


def test_what_is_trained_on_was_scored_exactly_once(run: Run) -> None:
    seen = [row for step in STEPS for row in run.rollouts(step)]
    assert len({row["uid"] for row in seen}) == len(seen)
    assert not responses(seen) - responses([call for call in run.calls if call["split"] == "train"])


def responses(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["output"], row["gts"]) for row in rows)


def test_staleness_is_logged_and_bounded(run: Run) -> None:
    staleness = [run.steps[step]["training/off_policy/trajectory_staleness_worst/max"] for step in STEPS]
    assert staleness[0] == 0
    assert max(staleness) in (1, 2)
