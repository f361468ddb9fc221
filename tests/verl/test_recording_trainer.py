"""The phases and advantages that the trainer records, without a run: TransferQueue is a dict here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from reward_loop.records import Records
from reward_loop.records.events import read_events
from reward_loop.verl import sample_table, tq_rows
from reward_loop.verl.recording_trainer import RecordedSeconds
from reward_loop.verl.reward_metrics import StepRewards, TrajectoryReward, added_seconds
from reward_loop.verl.trainer import with_reward_loop
from tests.verl.configs import resolved

pytestmark = pytest.mark.integration  # imports verl


def test_a_phase_ends_whenever_a_timer_adds_seconds() -> None:
    ended: list[tuple[str, float]] = []
    seconds = RecordedSeconds(lambda name, added: ended.append((name, added)))
    with marked_timer("step", seconds):
        with marked_timer("update_actor", seconds):
            pass
        with added_seconds("update_actor", seconds):
            pass
    assert [name for name, _ in ended] == ["update_actor", "update_actor", "step"]
    assert sum(added for name, added in ended if name == "update_actor") == pytest.approx(seconds["update_actor"])
    seconds["switch_wait"] = 0.0
    seconds["update_actor"] -= 0.5  # seconds that were counted twice
    assert len(ended) == 3


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    made: Any = object.__new__(with_reward_loop(PPOTrainerSync))
    made._settings, made._colocated = resolved(f"reward_loop.log_dir={tmp_path}"), None
    made._records, made._rewards = Records(tmp_path), StepRewards()
    made._health = SimpleNamespace(metrics=lambda step, rewards, audit: {})
    made.reward_workers = SimpleNamespace(
        check_fatal_errors=list, check_fatal_errors_briefly=list, stop=list, proof_counts=lambda: None
    )
    made.global_steps, made._left_out = 7, {}
    return made


def test_the_trainer_records_its_phases_with_the_step(trainer: Any, tmp_path: Path) -> None:
    trainer.timing_raw = {}
    with marked_timer("gen", trainer.timing_raw):
        pass
    with added_seconds("wait_reward", trainer.timing_raw):
        pass
    assert trainer._records.flush()
    found = list(read_events(tmp_path))
    assert [(event["name"], event["step"], event["waits_for"]) for event in found] == [
        ("gen", 7, "rewards"),
        ("wait_reward", 7, "rewards"),
    ]
    for event in found:
        assert event["end"] - event["start"] == pytest.approx(trainer.timing_raw[event["name"]], abs=1e-5)


def test_without_a_folder_the_timings_are_a_plain_dict(trainer: Any) -> None:
    trainer._records = None
    trainer.timing_raw = seconds = {}
    assert trainer.timing_raw is seconds


@pytest.mark.parametrize(
    ("options", "waits_for"),
    [
        ((), "rewards"),
        (("trainer.v1.trainer_mode=reward_pipeline",), "rollouts"),
    ],
)
def test_the_cause_of_waiting_during_generation_is_recorded(
    trainer: Any, tmp_path: Path, options: tuple[str, ...], waits_for: str
) -> None:
    trainer._settings = resolved(f"reward_loop.log_dir={tmp_path}", *options)
    assert trainer._waits_for("gen") == waits_for
    assert trainer._waits_for("update_actor") is None
    assert trainer._waits_for("wait_reward") == "rewards"


def test_the_advantage_is_the_mean_over_the_tokens_that_are_trained_on(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "q_0_0": ([9.0, 9.0], [1, 1]),  # an earlier output of the session
        "q_0_1": ([1.0, 5.0, 2.0], [1, 0, 1]),
        "q_1_0": ([-0.5], [1]),
        "q_2_0": ([3.0], [0]),  # verl's rejection sampling has cleared the mask
    }

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        assert (partition_id, select_fields) == ("train", ["advantages", "response_mask"])
        nested = {}
        for i, field in enumerate(select_fields):
            values = [torch.tensor(rows[key][i]) for key in keys]
            nested[field] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return nested

    monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=get))
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, timing_raw, **kwargs: None)
    monkeypatch.setattr(trainer, "_trained_rewards", dict)
    trainer._rewards.trained = set(rows)
    trainer._rewards.trajectories = dict.fromkeys([*rows, "q_3_0"])  # the last one is masked
    trainer._compute_metrics(SimpleNamespace(partition_id="train", keys=[], tags=[]), {}, {}, global_steps=7, epoch=0)
    assert trainer._records.flush()
    written = [json.loads(line) for line in trainer._records.path.read_text().splitlines()]
    assert {line["uid"]: line["advantage"] for line in written} == {"q_0": 1.5, "q_1": -0.5, "q_2": None, "q_3": None}
    assert {(line["kind"], line["step"]) for line in written} == {("advantage", 7)}


def test_advantages_that_cannot_be_read_do_not_stop_the_run(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise KeyError("advantages")

    monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=fail))
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, timing_raw, **kwargs: None)
    monkeypatch.setattr(trainer, "_trained_rewards", lambda: {"critic/score/mean": 1.0})
    trainer._rewards.trained = {"q_0_0"}
    metrics: dict[str, float] = {}
    trainer._compute_metrics(
        SimpleNamespace(partition_id="train", keys=[], tags=[]), metrics, {}, global_steps=7, epoch=0
    )
    assert metrics == {"critic/score/mean": 1.0}
    assert "the advantages of step 7 are not recorded" in caplog.text
    assert trainer._records.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_samples_is_logged_with_the_metrics_of_the_step(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, torch.Tensor]:
        assert (keys, partition_id) == (["q_0_0"], "train")
        values = {"prompts": [8, 9], "responses": [1, 2, 0]}
        return {
            field: torch.nested.as_nested_tensor([torch.tensor(values[field])], layout=torch.jagged)
            for field in select_fields
        }

    def decode(ids: torch.Tensor, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return str(ids.tolist())

    def fit(self: Any, agent_loop_manager: Any) -> None:
        self.logger = Tracking("project", "run", ["console"])
        self.logger.logger["wandb"] = None
        self._compute_metrics(SimpleNamespace(partition_id="train", keys=[], tags=[]), {}, {}, global_steps=7, epoch=0)
        del self.logger.logger["wandb"]

    written: list[Any] = []
    monkeypatch.setattr(sample_table, "_WRITERS", {"wandb": lambda step, rows: written.append((step, rows))})
    monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=get))
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, timing_raw, **kwargs: None)
    monkeypatch.setattr(PPOTrainer, "fit", fit)
    monkeypatch.setattr(trainer, "_trained_rewards", dict)
    trainer._settings, trainer._records = resolved("reward_loop.log_samples=3"), None
    trainer._health.flush = lambda: None
    info = {"reward_outcome": "scored", "format": 1.0}
    trainer._rewards.trajectories["q_0_0"] = TrajectoryReward(info, reward=0.75, raw_score=0.5)
    rollout = SimpleNamespace(n=1, val_kwargs=SimpleNamespace(n=1))
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
    trainer.replay_buffer = SimpleNamespace(checks=[])
    trainer.config = SimpleNamespace(
        trainer=SimpleNamespace(logger=["console", "wandb"]), actor_rollout_ref=SimpleNamespace(rollout=rollout)
    )
    trainer.tokenizer = SimpleNamespace(decode=decode)
    trainer.fit(SimpleNamespace(agent_loop_workers=[]))
    row = [7, "lowest", "q_0", "[8, 9]", "[1, 2, 0]", 0.5, 0.75, "scored", '{"format": 1.0}', ""]
    assert written == [(7, [row])]
