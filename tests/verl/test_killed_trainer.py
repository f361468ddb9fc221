"""The records of a run of verl that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from reward_loop.records.reader import RecordsReader
from reward_loop.view.app import create_app
from reward_loop.view.index import Index
from reward_loop.view.phases import PhaseReader
from tests.verl.runs import train

pytestmark = pytest.mark.integration


def test_the_viewer_shows_a_run_that_was_killed(
    tmp_path: Path, tiny_generative_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(
        tmp_path / "run",
        tiny_generative_model,
        "trainer.total_training_steps=1000",
        "trainer.val_before_train=False",
        function="kills_the_trainer",
        returncode=None,
    )
    folder = run.directory / "checkpoints" / "rewards"
    recorded = {row["uid"]: row for row in RecordsReader(folder).rows()}
    for step in (1, 2):
        for rollout in run.rollouts(step):
            record = recorded[rollout["uid"].rsplit("_", 1)[0]]
            assert (record["step"], record["outcome"]) == (step, "scored")
            assert record["reward"] == pytest.approx(rollout["score"])
    assert PhaseReader(folder).steps()[1]["phases"]["update_actor"] == pytest.approx(
        run.steps[1]["timing_s/update_actor"], abs=1e-3
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Index(folder) as index:
        index.update()
        with TestClient(create_app(index)) as viewer:
            assert viewer.get("/api/run").json()["samples"] == len(recorded)
            shown = viewer.get("/api/samples?step=2&limit=1").json()["rows"][0]
            assert viewer.get(f"/api/sample/{shown['id']}").json()["texts"]["response"]
