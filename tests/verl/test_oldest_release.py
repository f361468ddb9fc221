"""Short runs with the oldest supported release of verl, which ``make test`` installs.

``make test VERL=0.9.0`` runs all tests of this folder with it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from reward_loop.verl.compat import SUPPORTED, installed_version
from tests.gsm8k import ROOT
from tests.verl import rewards
from tests.verl.checks import check_reward_metrics, check_scores, texts
from tests.verl.runs import Run, train

OLDEST = SUPPORTED[0]
FOLDER = ROOT / ".venv" / f"verl-{OLDEST}"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} does not exist: run `make {FOLDER.relative_to(ROOT)}`"),
    pytest.mark.skipif(installed_version() == OLDEST, reason=f"all tests run with verl {OLDEST} already"),
]


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Two steps and two validations; some samples unscored, some failed."""
    return train(
        tmp_path_factory.mktemp("sync"),
        tiny_generative_model,
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        function="Located",
        verl=FOLDER,
    )


@pytest.fixture(scope="module")
def pipeline_run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Two steps with both overlaps, and two mini-batches a step."""
    return train(
        tmp_path_factory.mktemp("pipeline"),
        tiny_generative_model,
        "trainer.v1.trainer_mode=reward_pipeline",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        function="Located",
        verl=FOLDER,
    )


@pytest.mark.parametrize("mode", ["sync_run", "pipeline_run"])
def test_every_sample_is_scored_and_trained_on_exactly_once(mode: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(mode)
    assert run.returncode == 0, run.output[-5000:]
    assert (run.directory / "verl.txt").read_text() == str(FOLDER / "verl" / "__init__.py")
    seen = [row for step in (1, 2) for row in run.rollouts(step)]
    assert len(seen) == 2 * 8 * 4
    assert texts([call for call in run.calls if call["split"] == "train"]) == texts(seen)
    for step in (1, 2):
        check_scores(run.rollouts(step))
        check_reward_metrics(run.steps[step], run.rollouts(step))


def test_validation_means_are_over_the_scored_samples(sync_run: Run) -> None:
    for step in (0, 2):
        numbers = [rewards.number(row["output"]) for row in sync_run.validation(step)]
        scores = [(n % 100) / 100 for n in numbers if n % 7 > 1]
        assert sync_run.steps[step]["val-core/sums/reward/mean@1"] == pytest.approx(statistics.mean(scores))
        assert sync_run.steps[step]["val-aux/reward_outcome/scored"] == len(scores)


def test_the_pipeline_overlaps(pipeline_run: Run) -> None:
    assert pipeline_run.steps[2]["reward_pipeline/off_policy_steps"] == 1
    assert pipeline_run.steps[2]["reward_pipeline/update_calls"] >= 1
