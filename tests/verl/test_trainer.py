"""What the trainer does with rewards, without a run: TransferQueue is a dict here."""

from __future__ import annotations

import math
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from reward_loop.errors import RewardLoopError
from reward_loop.verl import tq_rows
from reward_loop.verl.run import task_runner
from reward_loop.verl.tq_rows import token_rewards, turns_of
from tests.verl import trainers
from tests.verl.configs import resolved
from tests.verl.fake_queue import FakeQueue
from tests.verl.trainers import constructed, set_up

pytestmark = pytest.mark.integration  # imports verl

SINGLE = torch.tensor([1, 1, 1, 1])
TOOL = torch.tensor([1, 1, 0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("mask", "info", "placed"),
    [
        (SINGLE, {}, [0, 0, 0, 2]),
        (SINGLE, {"token_level_scores": [0.5, 0.5, 0.5, 0.5]}, [0.5, 0.5, 0.5, 0.5]),
        (SINGLE, {"token_level_scores": [1, 0, 0, 0]}, [1, 0, 0, 1]),
        (SINGLE, {"turn_level_scores": [2]}, [0, 0, 0, 2]),
        # A tool's text at the end is not trained on: the last token that the policy wrote has the rest.
        (TOOL, {}, [0, 0, 0, 0, 0, 2, 0]),
        (TOOL, {"turn_level_scores": [0.5, 1]}, [0, 0.5, 0, 0, 0, 1.5, 0]),
        (TOOL, {"turn_level_scores": [1, 1], "token_level_scores": [0.25] * 7}, None),
        (TOOL[2:4], {}, [0, 2]),  # the policy wrote nothing
        (SINGLE[:0], {"token_level_scores": []}, []),
        (SINGLE[:0], {"turn_level_scores": []}, []),
    ],
)
def test_parts_are_placed_and_add_up_to_the_reward(mask: torch.Tensor, info: dict, placed: list[float] | None) -> None:
    result = token_rewards(2.0, mask, info)
    if placed is not None:
        assert result.tolist() == placed
    else:
        assert result.sum() == 2.0


@pytest.mark.parametrize(
    ("mask", "turns"), [([1, 1, 0, 1], [2, 1, 1]), ([0, 0, 1], [0, 2, 1]), ([1, 1], [2]), ([0], [0, 1]), ([], [])]
)
def test_turns_begin_with_the_policy(mask: list[int], turns: list[int]) -> None:
    assert turns_of(mask) == turns


@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_a_reward_before_a_tools_text_reaches_the_returns(name: str) -> None:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_grpo_outcome_advantage

    mask = TOOL.float().expand(2, -1)
    rewards = torch.stack([token_rewards(score, TOOL, {"turn_level_scores": [0.0, score / 2]}) for score in (0.0, 1.0)])
    if name == "gae":
        _, returns = compute_gae_advantage_return(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    else:
        _, returns = compute_grpo_outcome_advantage(rewards, mask, np.array(["q", "q"]))
    assert float(returns[1].max()) > float(returns[0].max())


Rows = dict[str, dict[str, Any]]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Rows:
    fake = FakeQueue()
    monkeypatch.setattr(tq_rows, "tq", fake)
    return fake.rows


def row(mask: torch.Tensor, score: float, /, **info: Any) -> dict[str, Any]:
    """A row of TransferQueue, with its reward at the last token."""
    scores = torch.zeros(len(mask))
    scores[-1] = score
    info = {"reward_outcome": "scored", "reward_masked": False, "reward_error": "", **info}
    return {
        "response_mask": mask,
        "loss_mask": mask,
        "responses": torch.ones_like(mask),
        "rm_scores": scores,
        "extra_fields": {"turns": 1, "reward_extra_info": info},
    }


def test_rewards_of_a_batch_are_written_to_all_outputs_and_parts_to_the_last(queue: Rows) -> None:
    queue |= {"q_0_0": row(SINGLE, 0.0), "q_0_1": row(TOOL, 0.0), "q_2_0": row(SINGLE, 5.0)}
    batch = KVBatchMeta(partition_id="train", keys=list(queue), tags=[{} for _ in queue])
    info = {"turn_level_scores": [1.0, 0.5], "reward_outcome": "scored"}
    tq_rows.write_rewards(batch, ["q_0_1"], [{"reward_score": 2.0, "reward_extra_info": info}])
    assert queue["q_0_0"]["rm_scores"].tolist() == [0, 0, 0, 2]  # an earlier output
    assert queue["q_0_1"]["rm_scores"].tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert queue["q_2_0"]["rm_scores"].tolist() == [0, 0, 0, 5]
    assert queue["q_0_0"]["extra_fields"] == {"turns": 1, "reward_extra_info": info}


class Step:
    """A step of a trainer on all rows in the queue, with GRPO."""

    def __init__(self, queue: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = resolved("algorithm.adv_estimator=grpo")
        self.trainer = made = set_up(monkeypatch, constructed(settings), trainers.Workers())
        made.prepare_step = dict
        batch = KVBatchMeta(partition_id="train", keys=list(queue), tags=[{} for _ in queue])

        def compute(self: Any, batch: Any, metrics: dict) -> None:
            last = {key.rsplit("_", 1)[0]: key for key in batch.keys}
            scores = {session: float(queue[key]["rm_scores"].sum()) for session, key in last.items()}
            mean, deviation = np.mean(list(scores.values())), np.std(list(scores.values()), ddof=1)
            for key in batch.keys:
                advantage = (scores[key.rsplit("_", 1)[0]] - mean) / deviation
                queue[key]["advantages"] = advantage * queue[key]["response_mask"]
                queue[key]["returns"] = queue[key]["advantages"]

        def step_once(self: Any, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
            return self._compute_advantage(self.replay_buffer.usable(batch), metrics)

        monkeypatch.setattr(PPOTrainer, "_step_once", step_once)
        monkeypatch.setattr(PPOTrainer, "_compute_advantage", compute)
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, *_: None)
        self.metrics: dict[str, float] = {}
        learners = made.step(self.metrics, made.timing_raw)
        self.left_out = list(learners.keys)
        made._compute_metrics(learners, self.metrics, made.timing_raw, global_steps=1, epoch=0)
        self.left_out = learners.keys[len(self.left_out) :]
        """The rows without an advantage, which are written and deleted with the others."""


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_reward_of_an_agent_loop_that_is_not_finite_leaves_loss_and_baseline(
    queue: Rows, monkeypatch: pytest.MonkeyPatch, score: float
) -> None:
    for session, own in enumerate((1.0, 2.0, 3.0, score)):
        queue[f"q_{session}_0"] = row(SINGLE, own)
    step = Step(queue, monkeypatch)
    assert "q_3_0" in step.left_out
    error = step.trainer._rewards.trajectories["q_3_0"].result.error
    assert "sample q_3: the manager returned the score" in str(error)
    assert (step.metrics["reward_loop/scored"], step.metrics["reward_loop/failed"]) == (3, 1)
    assert [float(queue[f"q_{session}_0"]["advantages"].max()) for session in range(3)] == [-1, 0, 1]


def test_losses_by_row_are_divided_by_the_rows_with_an_advantage(queue: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    queue |= {f"q_{session}_0": row(SINGLE, float(session)) for session in range(6)}
    made = Step(queue, monkeypatch).trainer
    keys = list(queue)
    for padding, divisor in ((0, 3), (2, 3.0)):
        info = {"mini_batch_size": (6 + padding) // 2, "global_batch_size": (6 + padding) // 2}
        rows = [*keys, *[f"pad_{number}_0" for number in range(padding)]]
        update = KVBatchMeta(keys=rows, tags=[{} for _ in rows], extra_info=info)
        assert made.actor_rollout_wg.update_actor(update).extra_info["global_batch_size"] == divisor


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("learners", "padding", "size"), [(9, 7, 8), (5, 3, 4), (3, 13, 4), (2, 14, 8), (8, 0, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_each_mini_batch_has_about_as_many_learners_as_the_others(
    learners: int, padding: int, ranks: int, size: int, seed: int
) -> None:
    is_learner = [True] * learners + [False] * padding
    random.Random(seed).shuffle(is_learner)
    order = tq_rows.spread_learners(is_learner, ranks, size)
    assert len(set(order)) == len(order) == size * math.ceil(learners / size)
    assert sum(is_learner[row] for row in order) == learners
    own, share = len(order) // ranks, size // ranks
    counts = [
        sum(is_learner[order[rank * own + first + i]] for rank in range(ranks) for i in range(share))
        for first in range(0, own, share)
    ]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


def test_an_actor_with_smaller_mini_batches_than_the_critic_has_none_without_a_learner(
    queue: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is padded to a mini-batch of the critic, which is four of the actor."""
    queue |= {f"q_{session}_0": row(SINGLE, float(session)) for session in range(3)}
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=8")
    made = set_up(monkeypatch, constructed(resolved(*sizes, "actor_rollout_ref.rollout.n=4")))
    made._rewards.trained = set(queue)
    updates: dict[str, list[str]] = {}
    for name in ("_update_actor", "_update_critic"):
        monkeypatch.setattr(PPOTrainer, name, lambda self, rows, metrics, name=name: updates.update({name: rows.keys}))
        keys = [*queue, *(f"pad_{number}_0" for number in range(29))]
        getattr(made, name)(KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), {})
    assert {name: len(rows) for name, rows in updates.items()} == {"_update_actor": 8, "_update_critic": 32}
    assert all(set(queue) < set(rows) for rows in updates.values())


@pytest.mark.parametrize("mode", ["sync", "reward_pipeline", "separate_async"])
def test_a_dead_process_is_named_unless_a_reward_worker_has_an_error_that_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    raised: list[Exception] = []

    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        raise raised[-1]

    monkeypatch.setattr(PPOTrainer, "step", step)
    job = trainers.NoJob()
    made = set_up(monkeypatch, constructed(resolved(f"trainer.v1.trainer_mode={mode}"), job=job))
    raised.append(ActorDiedError())
    with pytest.raises(RewardLoopError, match=r"a process of the run died.*unexpectedly"):
        made.step({}, {})
    job.why = "the judge is on strike"
    with pytest.raises(RewardLoopError, match="on strike"):
        made.step({}, {})
    job.why = None
    raised.append(ValueError("the update failed"))
    with pytest.raises(ValueError, match="the update failed"):
        made.step({}, {})


@pytest.mark.parametrize("mode", ["sync", "reward_pipeline"])
def test_weights_that_never_arrive_end_the_run(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    settings = resolved(f"trainer.v1.trainer_mode={mode}", "trainer.v1.sampler.stall_timeout_s=0.1")
    made = set_up(monkeypatch, constructed(settings, task_runner._trainer_class(settings.config, settings.mode)))
    ended = threading.Event()
    made.checkpoint_manager = SimpleNamespace(update_weights=lambda step: ended.wait(30))
    for hook in (made.on_init_end, made.on_step_end):
        with pytest.raises(RewardLoopError, match=r"step 1: the policy's weights have not reached .* after 0\.1 s"):
            hook()
    ended.set()


def test_an_error_of_the_weights_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: int) -> None:
        raise TimeoutError("no route to the server")

    made = set_up(monkeypatch, constructed())
    sent: list[int] = []
    made.checkpoint_manager = SimpleNamespace(update_weights=sent.append)
    made.on_step_end()
    assert sent == [1]
    assert made.timing_raw["update_weights"] >= 0
    made.checkpoint_manager = SimpleNamespace(update_weights=fail)
    with pytest.raises(TimeoutError, match="no route"):
        made.on_step_end()
