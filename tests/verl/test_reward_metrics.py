"""Which rows of a step are trained on, and the metrics of their rewards, recomputed from the samples."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer, trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from reward_loop.verl import tq_rows
from reward_loop.verl.tq_rows import TrajectoryReward
from reward_loop.verl.trainer import reward_loop_trainer as trainer
from reward_loop.verl.trainer.reward_loop_trainer import NothingToLearnError
from reward_loop.verl.trainer.reward_metrics import StepRewards, only_numbers
from tests.verl.configs import ROLLOUT_ELSEWHERE, resolved, settled
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import Workers, constructed, set_up

pytestmark = pytest.mark.integration  # imports verl


def test_metrics_of_samples_whose_keys_differ() -> None:
    infos: dict[str, dict[str, Any]] = {
        "a_0_0": {"reward_outcome": "scored", "reward_work_s": 1.0, "score": 1.0, "format": True, "text": "x"},
        "a_1_0": {
            "reward_outcome": "scored",
            "reward_work_s": 3.0,
            "reward_wait_s": 0.5,
            "reward_queue_s": 0.25,
            "reward_attempts": 2,
            "score": 3.0,
            "judge": np.float32(0.5),
        },
        "a_2_0": {"reward_outcome": "failed", "reward_work_s": 2.0, "steps": [1, 2]},
        "a_2_1": {"reward_outcome": "unscored", "reward_work_s": 2.0},  # the session's last output counts
        "a_3_0": {"reward_outcome": "failed", "reward_masked": True, "score": 0.0},  # as with a filter by this key
    }
    scores = dict.fromkeys(infos, 0.0) | {"a_0_0": 1.0, "a_1_0": 3.0}
    rewards = {key: TrajectoryReward(info, scores[key]) for key, info in infos.items()}
    assert StepRewards(rewards).metrics() == {
        "reward_loop/scored": 2,
        "reward_loop/unscored": 1,
        "reward_loop/failed": 1,
        "reward_loop/raw_score/mean": 2.0,
        "reward_loop/work_s/mean": 2.0,
        "reward_loop/work_s/max": 3.0,
        "reward_loop/wait_s/mean": 0.5,
        "reward_loop/wait_s/max": 0.5,
        "reward_loop/queue_s/mean": 0.25,
        "reward_loop/queue_s/max": 0.25,
        "reward_loop/attempts/mean": 2.0,
        "reward_loop/attempts/max": 2.0,
        "reward_loop/outage/samples": 0.0,
        "reward_loop/outage/seconds": 0.0,
        "reward_loop/score/mean": 2.0,
        "reward_loop/format/mean": 1.0,
        "reward_loop/judge/mean": 0.5,
    }
    assert "format" not in infos["a_1_0"]


SCORED = {"reward_outcome": "scored", "reward_error": ""}
FAILED = {"reward_outcome": "failed", "reward_masked": True, "reward_error": "no judge"}


class Run:
    """verl's trainer, from the sampled batch to the advantage. A sample is its score, or ``None`` if it failed."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        queue: FakeQueue,
        parts: list[list[list[float | None]]],
    ) -> None:
        self.queue = queue
        self.parts = iter(enumerate(parts))
        self.updated: list[list[str]] = []
        settings = resolved(
            "trainer.v1.trainer_mode=separate_async",
            f"trainer.v1.separate_async.parameter_sync_step={len(parts)}",
            f"data.train_batch_size={8 * len(parts)}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            *ROLLOUT_ELSEWHERE,
            "algorithm.adv_estimator=grpo",
        )
        self.trainer = set_up(monkeypatch, constructed(settings, PPOTrainerSeparateAsync), Workers())
        self.trainer.prepare_step = dict
        run = self

        def step_once(self: Any, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
            batch = self.replay_buffer.usable(run.sample())
            self._compute_advantage(batch, metrics)
            run.updated.append(batch.keys)
            return batch

        monkeypatch.setattr(PPOTrainer, "_step_once", step_once)
        self.sampled = 0
        monkeypatch.setattr(
            PPOTrainerSeparateAsync, "on_sample_end", lambda self: setattr(run, "sampled", run.sampled + 1)
        )
        monkeypatch.setattr(PPOTrainer, "_compute_advantage", lambda self, batch, metrics, *_: batch)
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, *_: None)

    def sample(self) -> KVBatchMeta:
        part, groups = next(self.parts)
        keys = []
        for number, group in enumerate(groups):
            for session, score in enumerate(group):
                keys.append(f"p{part}g{number}_{session}_0")
                info = FAILED if score is None else {**SCORED, "summary": score, "terminated": score}
                self.queue.put(keys[-1], score or 0.0, info)
        return KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])

    def step(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        batch = self.trainer.step(metrics, self.trainer.timing_raw)
        self.trainer._compute_metrics(batch, metrics, self.trainer.timing_raw, global_steps=1, epoch=0)
        self.written = batch.keys
        return metrics


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, queue: FakeQueue) -> Callable[..., Run]:
    return functools.partial(Run, monkeypatch, queue)


def test_counts_of_a_steps_parts_are_added_and_means_are_over_all_samples(started: Callable[..., Run]) -> None:
    """verl would take the mean of the counts, the sum of `summary` and the smallest of `terminated`."""
    metrics = started([[[0.2, 0.6, None]], [[0.6, 0.6, 0.6]]]).step()
    assert (metrics["reward_loop/scored"], metrics["reward_loop/failed"], metrics["reward_loop/unscored"]) == (5, 1, 0)
    mean = pytest.approx(statistics.mean([0.2, 0.6, 0.6, 0.6, 0.6]))
    assert metrics["reward_loop/summary/mean"] == metrics["reward_loop/terminated/mean"] == mean


def test_a_part_without_a_score_does_not_end_the_step(started: Callable[..., Run]) -> None:
    for parts, empty in (([[[None, None]], [[0.0, 1.0]]], 0), ([[[0.0, 1.0]], [[None, None]]], 1)):
        run = started(parts)
        metrics = run.step()
        assert (metrics["reward_loop/scored"], metrics["reward_loop/failed"]) == (2, 2)
        assert run.updated == [[f"p{1 - empty}g0_0_0", f"p{1 - empty}g0_1_0"]]
        assert (
            run.sampled == 1
        )  # verl would put the rollout to sleep after sampling: also for an update that is skipped
        # The rows without a score are written with the others, and deleted.
        assert {f"p{empty}g0_{session}_0" for session in range(2)} < set(run.written)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_reward_of_an_agent_loop_that_is_not_finite_leaves_loss_and_baseline(
    started: Callable[..., Run], score: float
) -> None:
    run = started([[[1.0, 2.0, 3.0, score]]])
    metrics = run.step()
    assert run.updated == [["p0g0_0_0", "p0g0_1_0", "p0g0_2_0"]]
    assert "p0g0_3_0" in run.written
    error = run.trainer._rewards.trajectories["p0g0_3_0"].result.error
    assert "sample p0g0_3: the manager returned the score" in str(error)
    assert (metrics["reward_loop/scored"], metrics["reward_loop/failed"]) == (3, 1)


def test_losses_by_row_are_divided_by_the_rows_with_an_advantage(started: Callable[..., Run]) -> None:
    run = started([[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]])
    run.step()
    for padding, divisor in ((0, 3), (2, 3.0)):
        size = (6 + padding) // 2
        rows = [*run.written, *[f"pad_{number}_0" for number in range(padding)]]
        info = {"mini_batch_size": size, "global_batch_size": size}
        update = KVBatchMeta(keys=rows, tags=[{} for _ in rows], extra_info=info)
        assert run.trainer.actor_rollout_wg.update_actor(update).extra_info["global_batch_size"] == divisor


def test_a_step_without_any_score_ends_the_run(started: Callable[..., Run]) -> None:
    run = started([[[None, None]], [[None, None]]])
    with pytest.raises(NothingToLearnError, match=r"no sample of step 1 has .* 2 failed of 2 samples: no judge"):
        run.step()
    assert not run.updated


def test_only_the_columns_that_a_reward_worker_receives_are_fetched(queue: FakeQueue) -> None:
    ids = torch.arange(4)
    row: dict[str, Any] = {
        **dict.fromkeys(("prompts", "responses", "input_ids", "position_ids", "response_mask"), ids),
        "num_turns": 2,
        "extra_fields": {"tool": 1},
        **{name: f"of the data set: {name}" for name in ("uid", "data_source", "reward_model", "raw_prompt", "mine")},
        "choices": np.array(["yes", "no"]),
        **dict.fromkeys(("routed_experts", "rollout_log_probs", "response_mask", "loss_mask", "rm_scores"), ids),
        "multi_modal_inputs": {"pixel_values": ids},
        "metrics": {"generate_sequences": 1.0},
    }
    queue.rows["a_0_0"] = row
    _, (data,) = tq_rows.read_sessions(KVBatchMeta(partition_id="train", keys=["a_0_0"], tags=[{}]))
    (fetched,) = queue.fetched
    assert fetched == {
        *("prompts", "responses", "input_ids", "position_ids", "response_mask", "num_turns", "extra_fields"),
        *("uid", "data_source", "reward_model", "raw_prompt", "mine", "choices"),
    }
    assert data.non_tensor_batch["mine"][0] == "of the data set: mine"
    assert data.non_tensor_batch["session_id"][0] == "0"
    assert data.non_tensor_batch["tool_extra_fields"][0] == {"tool": 1}
    assert data.non_tensor_batch["__num_turns__"][0] == 2
    assert data.non_tensor_batch["choices"][0].tolist() == ["yes", "no"]


def test_rows_that_an_agent_loop_manager_has_written_itself_have_rewards(queue: FakeQueue) -> None:
    """As those of verl's uni-agent."""
    queue.put("a_0_0", 0.5, SCORED)
    for key, info in (("b_0_0", {**SCORED, "acc": 1.0}), ("c_0_0", FAILED), ("d_0_0", None)):
        queue.put(key, 1.0, {})
        del queue.rows[key]["extra_fields"]
        if info is not None:
            queue.rows[key]["reward_extra_info"] = info
    batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=[{} for _ in queue.rows])
    for _ in range(2):
        rewards = tq_rows.read_rewards(batch)
        assert {key: (reward.result.outcome, reward.result.masked) for key, reward in rewards.items()} == {
            "a_0_0": ("scored", False),
            "b_0_0": ("scored", False),
            "c_0_0": ("failed", True),
            "d_0_0": ("scored", False),
        }
        assert rewards["b_0_0"].info["acc"] == 1.0
        changed = {"reward_score": 2.0, "reward_extra_info": {**rewards["b_0_0"].info, "raw_score": 1.0}}
        tq_rows.write_rewards(batch, ["b_0_0"], [changed])
    written = tq_rows.read_rewards(batch)["b_0_0"]
    assert (written.reward, written.info["raw_score"]) == (2.0, 1.0)


class Validation:
    """verl's own validation, of prompts with these scores and extra infos; a score of ``None`` is masked."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        queue: FakeQueue,
        folder: Path,
        *batches: dict[str, list[Any]],
        lost: int = 0,
    ) -> None:
        settings = resolved(
            "trainer.log_val_generations=99",
            f"trainer.validation_data_dir={folder}",
            f"actor_rollout_ref.rollout.val_kwargs.n={max(len(p) for b in batches for p in b.values()) + lost}",
        )
        made = set_up(monkeypatch, constructed(settings), step=3)
        self.batches, self.queue, self.shown = iter(batches), queue, []
        for module in (trainer_base, replay_buffer):
            monkeypatch.setattr(module, "tq", queue)
        made.tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, skip_special_tokens: str(ids.tolist()))
        made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        made.agent_loop_manager = SimpleNamespace(generate_sequences=self.generate)
        made.validation_generations_logger = SimpleNamespace(log=lambda to, samples, step: self.shown.extend(samples))
        made.val_dataloader = [self.rows(batch) for batch in batches]
        made._init_dump_executor()
        self.metrics = made._validate()
        made._shutdown_dump_executor()
        file = folder / "3.jsonl"
        self.written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @staticmethod
    def rows(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"raw_prompt": np.array(list(batch), dtype=object), "data_source": np.array(list(batch), dtype=object)}

    def generate(self, batch: Any) -> None:
        for uid, (source, group) in zip(batch["uid"], next(self.batches).items(), strict=True):
            self.queue.tags["val"][uid] |= {"status": "finished"}
            for session, (score, info) in enumerate(group):
                key = f"{uid}_{session}_0"
                self.queue.put(key, score or 0.0, (FAILED if score is None else SCORED) | info)
                self.queue.rows[key] |= {
                    "uid": uid,
                    "prompts": torch.tensor([len(source)]),
                    "num_turns": 2,
                    "data_source": source,
                    "reward_model": {"ground_truth": source},
                }
                self.queue.tags["val"][key] = {"status": "finished"}


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch, queue: FakeQueue, tmp_path: Path) -> Callable[..., Validation]:
    return functools.partial(Validation, monkeypatch, queue, tmp_path)


def test_masked_samples_leave_a_validation_before_verl_shows_or_averages_anything(
    validated: Callable[..., Validation], queue: FakeQueue
) -> None:
    """A filter by `acc` gives masked samples that key, too."""
    group = [(1.0, {"acc": 1.0}), (None, {"acc": 0.0}), (1.0, {"acc": 1.0}), (None, {})]
    run = validated({"math": group})
    for name in ("reward/mean@2", "acc/mean@2", "acc_success_only/mean@2"):
        (value,) = (value for key, value in run.metrics.items() if key.endswith(f"math/{name}"))
        assert value == 1.0, name
    assert not [name for name in run.metrics if "@4" in name]
    assert (run.metrics["val-aux/reward_outcome/scored"], run.metrics["val-aux/reward_outcome/failed"]) == (2, 2)
    assert [score for *_, score in run.shown] == [1.0, 1.0]
    assert [row["score"] for row in run.written] == [1.0, 1.0]
    assert not [key for key in queue.tags["val"] if "_" in key]


def test_a_validation_without_any_score_has_counts_only(
    validated: Callable[..., Validation], caplog: pytest.LogCaptureFixture
) -> None:
    run = validated({"math": [(None, {})]})
    assert run.metrics == {
        f"val-aux/reward_outcome/{name}": n for name, n in (("scored", 0), ("unscored", 0), ("failed", 1))
    }
    assert "no sample of the validation of step 3 has a score" in caplog.text
    assert (run.shown, run.written) == ([], [])


def test_the_files_of_rollouts_have_no_score_for_masked_samples_and_no_padding(
    monkeypatch: pytest.MonkeyPatch, started: Callable[..., Run]
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(PPOTrainer, "_dump_generations", lambda self, *args: written.append(args))
    groups: list[list[list[float | None]]] = [[[1.0, None, 0.5]]]
    run = started(groups)
    run.step()
    keys = [f"p0g0_{session}_0" for session in range(3)] + ["pad-1_0_0"]
    run.trainer._dump_generations(list("wxyz"), list("wxyz"), [None] * 4, [1.0, 0.0, 0.5, 0.5], {"uid": keys}, "folder")
    assert written == [(list("wxy"), list("wxy"), [None] * 3, [1.0, None, 0.5], {"uid": keys[:3]}, "folder")]


def test_what_json_lacks_is_written_in_a_readable_form(validated: Callable[..., Validation]) -> None:
    odd = [{1, 2}, b"x", {("a", 1): np.float32(2)}, float("nan"), np.array([1, 2])]
    rows = validated({"math": [(1.0, {"odd": value}) for value in odd]}).written
    assert [row["odd"] for row in rows] == [[1, 2], {"$bytes": "eA=="}, {"('a', 1)": 2.0}, None, [1, 2]]


def test_validation_metrics_of_samples_whose_keys_and_kinds_differ() -> None:
    columns = {
        "reward": [1.0, 0.0, 1.0],
        "judge": [None, 0.5, None],
        "steps": [[1, 2], [1], None],
        "verdict": [1.0, "unclear", {"a": 1}],
        "pred": ["4", "5", "4"],
    }
    numbers = only_numbers(columns)
    assert numbers["verdict"] == [1.0, None, None]
    verls = PPOTrainerSync(settled())._val_metrics_update
    metrics = verls(["math"] * 3, ["u"] * 3, numbers, ())
    assert metrics["val-aux/math/judge/mean@1"] == 0.5
    assert not [name for name in metrics if "steps" in name]
    assert "val-core/math/reward/maj@3/mean" in metrics
    with pytest.raises((ValueError, TypeError)):
        verls(["math"] * 3, ["u"] * 3, columns, ())


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_workers_end_after_training_and_before_the_limits_do(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    def fit(self: Any, agent_loop_manager: Any) -> None:
        if ends != "well":
            raise ValueError(ends)

    ended: list[str] = []
    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    monkeypatch.setattr(trainer.ray, "kill", ended.append)
    monkeypatch.setattr(trainer, "reset_unscored_prompts", lambda judged: set())
    run = set_up(monkeypatch, constructed(), Workers(stop=lambda: ended.append("reward workers")))
    run.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
    manager = SimpleNamespace(agent_loop_workers=["first", "second"])
    if ends == "well":
        run.fit(manager)
        assert ended == ["first", "second", "reward workers"]
    else:
        with pytest.raises(ValueError, match=ends):
            run.fit(manager)
        assert not ended
