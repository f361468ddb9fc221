"""A judge that needs several deadlines for the rollouts of a batch fails none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.verl.runs import Run, train

pytestmark = pytest.mark.integration

ROLLOUTS = 64
TIMEOUT_S = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    directory = tmp_path_factory.mktemp("queued")
    return train(
        directory,
        tiny_generative_model,
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "actor_rollout_ref.rollout.n=8",
        "reward_model.enable=True",
        "reward_model.rollout.name=transformers",
        f"reward_model.model.path={tiny_generative_model}",
        "+reward_model.server.max_batch_size=1",
        f"reward_loop.timeout={TIMEOUT_S}",
        "reward_loop.retry.max_attempts=1",
        "reward_loop.max_failed_share=1",
        f"reward_loop.log_dir={directory}/records",
        function="queued",
    )


def test_no_sample_fails_because_others_are_judged_before_it(run: Run) -> None:
    rows = [json.loads(line) for file in (run.directory / "records").glob("*.jsonl") for line in file.open()]
    samples = [row for row in rows if row["kind"] == "sample"]
    assert [row["outcome"] for row in samples] == ["scored"] * ROLLOUTS
    # The judge was busy for several deadlines. The wait is not part of the time of the function.
    assert max(row["wait_s"] for row in samples) > TIMEOUT_S
    assert run.steps[1]["reward_loop/failed"] == 0
