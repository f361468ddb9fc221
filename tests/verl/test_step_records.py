"""What the trainer records and computes of a step, without a run: TransferQueue is a dict here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.profiler import marked_timer, simple_timer

from reward_loop.config import RewardLoopConfig
from reward_loop.records import records
from reward_loop.records.trainer_events import read_events
from reward_loop.verl.tq_rows import TrajectoryReward, read_rewards
from reward_loop.verl.trainer import reward_loop_trainer
from reward_loop.verl.trainer.reward_loop_trainer import RecordedSeconds
from reward_loop.verl.trainer.reward_metrics import StepHealth, StepRewards, advantages, overlap_metrics
from tests.verl.configs import resolved
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import NoJob, constructed, set_up

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


def test_the_advantage_is_the_mean_over_the_tokens_that_are_trained_on(queue: FakeQueue) -> None:
    rows = {
        "q_0_0": ([9.0, 9.0], [1, 1]),  # an earlier output of the session
        "q_0_1": ([1.0, 5.0, 2.0], [1, 0, 1]),
        "q_1_0": ([-0.5], [1]),
        "q_2_0": ([3.0], [0]),  # verl's rejection sampling has cleared the mask
    }
    for key, (values, mask) in rows.items():
        queue.rows[key] = {"advantages": torch.tensor(values), "response_mask": torch.tensor(mask)}
    reward = TrajectoryReward({}, reward=0.0)
    masked = "q_3_0"
    written = advantages(StepRewards(dict.fromkeys([*rows, masked], reward), trained=set(rows)))
    assert written == {"q_0": 1.5, "q_1": -0.5, "q_2": None, "q_3": None}


def test_advantages_that_cannot_be_read_do_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = set_up(monkeypatch, constructed(resolved(f"reward_loop.log_dir={tmp_path}")), step=7)

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


def test_the_metrics_of_a_scripted_step() -> None:
    """Judging lasts while a reward is pending: from 0 to 4, and from 8 to 9."""
    judged = [(0, 4), (1, 2), (2.5, 3), (8, 9)]
    assert overlap_metrics(10, generation=3, waiting=1, judged=judged) == {
        "reward_pipeline/generation_s": 3,
        "reward_pipeline/judging_s": 5,
        "reward_pipeline/training_s": 6,
        "reward_pipeline/waiting_for_rewards_s": 1,
        "reward_pipeline/waiting_share": pytest.approx(0.1),
        "reward_pipeline/hidden_share": pytest.approx(0.8),
    }


def step_rewards(queue: FakeQueue, groups: int = 8) -> StepRewards:
    """The rewards of groups of four samples, the third of which is masked."""
    tokens = torch.arange(20)
    for group in range(groups):
        for session in range(4):
            key, score, masked = f"p{group}_{session}_0", session / 4, session == 2
            outcome = "unscored" if masked else "scored"
            info = {"reward_outcome": outcome, "reward_masked": masked, "reward_work_s": 1.0}
            numbers = {"score": score, "quality": 2 * score, "a/work_s": 1.0, "note": "x"}
            queue.put(key, score, info | ({} if masked else numbers), torch.ones_like(tokens))
            queue.rows[key]["responses"] = tokens + 100 * (4 * group + session)
    batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=[{} for _ in queue.rows])
    return StepRewards(read_rewards(batch))


@pytest.fixture
def live() -> StepHealth:
    job: Any = NoJob()
    return StepHealth(RewardLoopConfig(), job)


def test_the_live_numbers_of_a_step_become_metrics(queue: FakeQueue, live: StepHealth) -> None:
    assert live.metrics(1, step_rewards(queue)) == {
        "reward_loop/health/zero_variance_groups": 0,
        "reward_loop/health/masked_share": 0.25,
        "reward_loop/health/repetition": 0,
        "reward_loop/health/no_verdict": 0.25,
        "reward_loop/health/warnings": 0,
    }


def test_an_error_of_a_live_number_does_not_stop_the_run(
    queue: FakeQueue, live: StepHealth, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = step_rewards(queue)
    del queue.rows["p0_0_0"]["responses"]
    assert live.metrics(7, rewards) == {}
    assert "failed in step 7" in caplog.text


def test_a_bounded_number_of_responses_is_read(
    queue: FakeQueue, live: StepHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards, read = step_rewards(queue, groups=80), []
    monkeypatch.setattr(queue, "kv_batch_get", lambda keys, **_: read.append(keys))
    live.metrics(1, rewards)
    assert [len(keys) for keys in read] == [160]  # every second one
