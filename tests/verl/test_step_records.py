"""The phases and advantages that the trainer records, without a run: TransferQueue is a dict here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.profiler import marked_timer, simple_timer

from reward_loop.records import records
from reward_loop.records.trainer_events import read_events
from reward_loop.verl import tq_rows
from reward_loop.verl.tq_rows import TrajectoryReward
from reward_loop.verl.trainer import reward_loop_trainer
from reward_loop.verl.trainer.reward_loop_trainer import RecordedSeconds
from reward_loop.verl.trainer.reward_metrics import StepRewards, advantages
from tests.verl.configs import resolved
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import constructed, set_up

pytestmark = pytest.mark.integration  # imports verl


def test_a_phase_ends_whenever_a_timer_adds_seconds() -> None:
    ended: list[tuple[str, float]] = []
    seconds = RecordedSeconds(lambda name, added: ended.append((name, added)))
    with marked_timer("step", seconds):
        with marked_timer("update_actor", seconds):
            pass
        with simple_timer("update_actor", seconds):
            pass
    assert [name for name, _ in ended] == ["update_actor", "update_actor", "step"]
    assert sum(added for name, added in ended if name == "update_actor") == pytest.approx(seconds["update_actor"])
    seconds["switch_wait"] = 0.0
    seconds["update_actor"] -= 0.5  # seconds that were counted twice
    assert len(ended) == 3


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return set_up(monkeypatch, constructed(resolved(f"reward_loop.log_dir={tmp_path}")), step=7)


@pytest.mark.parametrize(
    ("options", "waits_for"),
    [
        ((), "rewards"),
        (("trainer.v1.trainer_mode=reward_pipeline",), "rollouts"),
    ],
)
def test_the_cause_of_waiting_during_generation_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], waits_for: str
) -> None:
    trainer = set_up(monkeypatch, constructed(resolved(f"reward_loop.log_dir={tmp_path}", *options)))
    for name in ("gen", "update_actor", "wait_reward"):
        with marked_timer(name, trainer.timing_raw):
            pass
    assert records(tmp_path).flush()
    assert [event["waits_for"] for event in read_events(tmp_path)] == [waits_for, None, "rewards"]


def test_the_advantage_is_the_mean_over_the_tokens_that_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "q_0_0": ([9.0, 9.0], [1, 1]),  # an earlier output of the session
        "q_0_1": ([1.0, 5.0, 2.0], [1, 0, 1]),
        "q_1_0": ([-0.5], [1]),
        "q_2_0": ([3.0], [0]),  # verl's rejection sampling has cleared the mask
    }
    queue = FakeQueue()
    for key, (values, mask) in rows.items():
        queue.rows[key] = {"advantages": torch.tensor(values), "response_mask": torch.tensor(mask)}
    monkeypatch.setattr(tq_rows, "tq", queue)
    reward = TrajectoryReward({}, reward=0.0)
    masked = "q_3_0"
    written = advantages(StepRewards(dict.fromkeys([*rows, masked], reward), trained=set(rows)))
    assert written == {"q_0": 1.5, "q_1": -0.5, "q_2": None, "q_3": None}


def test_advantages_that_cannot_be_read_do_not_stop_the_run(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("advantages")

    def compute(self: Any, batch: Any, metrics: dict, *_: Any) -> None:
        metrics["perf/throughput"] = 1.0

    monkeypatch.setattr(reward_loop_trainer, "advantages", fail)
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", compute)
    metrics: dict[str, float] = {}
    batch = SimpleNamespace(partition_id="train", keys=[], tags=[])
    trainer._compute_metrics(batch, metrics, {}, global_steps=7, epoch=0)
    assert metrics == {"perf/throughput": 1.0}
    assert "the advantages of step 7 are not recorded" in caplog.text
    assert records(tmp_path).flush()
    assert not list(tmp_path.glob("*.jsonl"))
