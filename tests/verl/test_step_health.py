"""The live numbers in verl's trainer, without a run: TransferQueue is a dict here."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reward_loop.config import HealthConfig, RewardLoopConfig
from reward_loop.records.trainer_events import HealthRecords, health
from reward_loop.verl import tq_rows
from reward_loop.verl.tq_rows import TrajectoryReward
from reward_loop.verl.trainer.reward_metrics import StepHealth, StepRewards

pytestmark = pytest.mark.integration  # imports verl

TOKENS = 20


class Run:
    """A run whose groups have four samples; the third sample of each group is masked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: int = 8) -> None:
        self.rows: dict[str, dict[str, torch.Tensor]] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        self.scores: dict[str, float] = {}
        self.counts: dict[str, Any] = {"calls": 0, "without_verdict": 0, "seconds": []}
        self.fetched: list[tuple[str, int]] = []
        for group in range(groups):
            for session in range(4):
                self._add(f"p{group}_{session}_0", group, session)
        monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=self._get))

    def _add(self, key: str, group: int, session: int) -> None:
        score = session / 4
        self.rows[key] = {"responses": torch.arange(TOKENS) + 100 * (4 * group + session)}
        self.scores[key] = score
        outcome = "unscored" if session == 2 else "scored"
        self.infos[key] = {"reward_outcome": outcome, "reward_masked": session == 2, "reward_work_s": 1.0}
        if session != 2:
            self.infos[key] |= {"score": score, "quality": 2 * score, "a/work_s": 1.0, "note": "x"}

    def _get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        (field,) = select_fields
        self.fetched.append((field, len(keys)))
        return {field: torch.nested.as_nested_tensor([self.rows[key][field] for key in keys], layout=torch.jagged)}

    def rewards(self) -> StepRewards:
        return StepRewards(
            {key: TrajectoryReward(self.infos[key], score, tokens=TOKENS) for key, score in self.scores.items()}
        )

    def health(self, folder: Path | None = None, **options: Any) -> StepHealth:
        config = RewardLoopConfig(log_dir=folder and str(folder), health=HealthConfig(**options))
        job: Any = SimpleNamespace(exchange_counts=lambda: self.counts)
        return StepHealth(config, job)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_the_values_of_a_step_become_metrics(run: Run) -> None:
    found = run.health().metrics(1, run.rewards())
    assert found == {
        "reward_loop/health/zero_variance_groups": 0,
        "reward_loop/health/masked_share": 0.25,
        "reward_loop/health/repetition": 0,
        "reward_loop/health/no_verdict": 0.25,
        "reward_loop/health/warnings": 0,
    }


def test_a_warning_is_logged_and_recorded_once(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitors = run.health(tmp_path, masked_share=0.1, no_verdict=None)
    with caplog.at_level(logging.WARNING):
        metrics = [monitors.metrics(step, run.rewards()) for step in range(1, 7)]
    assert [found["reward_loop/health/warnings"] for found in metrics] == [0, 0, 1, 1, 1, 1]
    (logged,) = caplog.messages
    assert logged.startswith(
        "reward_loop.health.masked_share: Since step 1, 25% of the samples are masked (limit 10%)."
    )
    assert str(tmp_path) in logged
    assert HealthRecords(tmp_path).flush()
    (warning,) = health(tmp_path)
    assert (warning["monitor"], warning["step"], warning["since"]) == ("masked_share", 3, 1)
    (path,) = (tmp_path / "health").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "values"] == [1, 2, 3, 4, 5, 6]


def test_an_error_of_a_number_does_not_stop_the_run(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    del run.rows["p0_0_0"]["responses"]
    assert run.health().metrics(7, run.rewards()) == {}
    assert "failed in step 7" in caplog.text


def test_a_bounded_number_of_responses_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, groups=80)
    run.health().metrics(1, run.rewards())
    assert run.fetched == [("responses", 160)]  # every second one
