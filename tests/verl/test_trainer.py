"""What the trainer does with rewards, without a run: TransferQueue is a dict here."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardLoopError, ScoringError
from reward_loop.limits import FailureBound
from reward_loop.managers.post_process import fail_reward
from reward_loop.types import RewardSample
from reward_loop.verl import pipeline, reward_changes, tq_rows  # noqa: F401  registers the mode reward_pipeline
from reward_loop.verl.reward_changes import misfit, place
from tests.verl import trainers
from tests.verl.configs import resolved
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
        (TOOL, {"turn_level_scores": [0.5, 1]}, [0, 0.5, 0, 0, 0, 1, 0.5]),
        (TOOL, {"turn_level_scores": [1, 1], "token_level_scores": [0.25] * 7}, None),
    ],
)
def test_parts_are_placed_and_add_up_to_the_reward(mask: torch.Tensor, info: dict, placed: list[float] | None) -> None:
    result = place(2.0, mask, info)
    assert result.sum() == 2.0
    if placed is not None:
        assert result.tolist() == placed


@pytest.mark.parametrize("name", ["token_level_scores", "turn_level_scores"])
def test_a_response_without_tokens_has_no_place_for_a_reward(name: str) -> None:
    assert misfit(SINGLE[:0], {name: []}) is None
    assert place(2.0, SINGLE[:0], {name: []}).tolist() == []


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"turn_level_scores": [1]}, "1 turn_level_scores, and the response has 2 turns"),
        ({"token_level_scores": [1, 1]}, "2 token_level_scores, and the response has 7 tokens"),
        ({"turn_level_scores": [1, float("nan")]}, "must be a list of finite numbers"),
        ({"turn_level_scores": 3.0}, "must be a list of finite numbers"),
    ],
)
def test_parts_that_do_not_fit_are_refused(info: dict, problem: str) -> None:
    assert problem in (misfit(TOOL, info) or "")


Rows = dict[str, dict[str, Any]]


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Rows:
    rows: Rows = {}

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        fields = {field: [rows[key][field] for key in keys] for field in select_fields}
        return {
            field: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            if isinstance(values[0], torch.Tensor)
            else values
            for field, values in fields.items()
        }

    def put(keys: list[str], partition_id: str, fields: Any) -> None:
        for field in fields.keys():  # noqa: SIM118
            values = fields[field].unbind() if isinstance(fields[field], torch.Tensor) else list(fields[field])
            for key, value in zip(keys, values, strict=True):
                rows[key][field] = getattr(value, "data", value) if isinstance(fields.get(field), list) else value

    monkeypatch.setattr(tq_rows, "tq", SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
    return rows


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


def test_the_parts_of_a_sessions_last_output_reach_the_trainer(queue: Rows) -> None:
    parts = {"turn_level_scores": [1.0, 0.5]}
    queue |= {
        "q_0_0": row(SINGLE, 2.0, **parts),
        "q_0_1": row(TOOL, 2.0, **parts),
        "q_2_0": row(SINGLE, 2.0, score=2.0),
    }
    batch = KVBatchMeta(partition_id="train", keys=list(queue), tags=[{} for _ in queue])
    reward_changes.place_parts(batch, tq_rows.read_rewards(batch))
    assert queue["q_0_0"]["rm_scores"].tolist() == [0, 0, 0, 2]  # an earlier output
    assert queue["q_0_1"]["rm_scores"].tolist() == [0, 1, 0, 0, 0, 0.5, 0.5]
    assert queue["q_2_0"]["rm_scores"].tolist() == [0, 0, 0, 2]


class Workers(trainers.Workers):
    """Applies a policy as the reward workers do."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.options = RewardLoopConfig(on_failed=policy, default_score=-1.0)  # type: ignore[arg-type]
        self.accepted = 0

    def reject(self, rewards: list[Any], names: list[str], problems: list[str], accepted: int) -> list[Any]:
        self.accepted += accepted
        bound = FailureBound.of_options(self.options)
        return [
            fail_reward(
                {"reward_score": 0.0, "reward_extra_info": {}},
                ScoringError(problem, sample=RewardSample("", uid=name)),
                bound,
                self.options,
            )
            for name, problem in zip(names, problems, strict=True)
        ]


class Step:
    """A step of a trainer on all rows in the queue, with GRPO. With a filter, the replay buffer has the parts checked
    before."""

    def __init__(
        self, queue: Rows, monkeypatch: pytest.MonkeyPatch, policy: str = "mask", filters: bool = False
    ) -> None:
        filter_groups = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward")
        settings = resolved("algorithm.adv_estimator=grpo", *(filter_groups if filters else ()))
        self.workers = Workers(policy)
        self.trainer = made = set_up(monkeypatch, constructed(settings), self.workers)
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
            return self._compute_advantage(self._balance_batch(batch, metrics), metrics)

        monkeypatch.setattr(PPOTrainer, "_step_once", step_once)
        monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda self, batch, metrics, *_: batch)
        monkeypatch.setattr(PPOTrainer, "_compute_advantage", compute)
        monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda self, batch, metrics, *_: None)
        if filters:
            buffer = made.replay_buffer
            buffer.finished_keys["train"], buffer.partitions["train"] = {"q"}, {key: {} for key in queue}
            buffer._dapo_filtered_keys("train")
        self.metrics: dict[str, float] = {}
        learners = made.step(self.metrics, made.timing_raw)
        self.left_out = list(learners.keys)
        made._compute_metrics(learners, self.metrics, made.timing_raw, global_steps=1, epoch=0)
        self.left_out = learners.keys[len(self.left_out) :]
        """The rows without an advantage, which are written and deleted with the others."""


@pytest.fixture
def rejected(queue: Rows) -> Rows:
    """The rewards 1, 2, 3, and 9, whose parts do not fit. The session with the 9 has two outputs."""
    bad = {"turn_level_scores": [9.0], "score": 9.0}
    for session, score in enumerate((1.0, 2.0, 3.0)):
        queue[f"q_{session}_0"] = row(TOOL, score, turn_level_scores=[score / 2, score / 2], score=score)
    queue["q_3_0"], queue["q_3_1"] = row(SINGLE, 9.0, **bad), row(TOOL, 9.0, **bad)
    return queue


@pytest.mark.parametrize("filters", [False, True])
def test_all_outputs_of_a_session_whose_parts_do_not_fit_leave_loss_and_baseline(
    rejected: Rows, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    step = Step(rejected, monkeypatch, filters=filters)
    for key in ("q_3_0", "q_3_1"):
        assert not rejected[key]["rm_scores"].any()
        assert "advantages" not in rejected[key]
        assert key in step.left_out
        info = rejected[key]["extra_fields"]["reward_extra_info"]
        assert (info["reward_outcome"], info["reward_masked"]) == ("failed", True)
        assert "sample q_3: the function returned 1 turn_level_scores" in info["reward_error"]
        assert rejected[key]["extra_fields"]["turns"] == 1
    assert [float(rejected[f"q_{session}_0"]["advantages"].max()) for session in range(3)] == [0, 0, 1]
    assert float(rejected["q_0_0"]["advantages"].min()) == -1
    assert (step.metrics["reward_loop/scored"], step.metrics["reward_loop/failed"]) == (3, 1)
    assert step.metrics["reward_loop/score/mean"] == 2.0
    assert step.workers.accepted == 3


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_reward_of_an_agent_loop_that_is_not_finite_leaves_loss_and_baseline(
    queue: Rows, monkeypatch: pytest.MonkeyPatch, score: float
) -> None:
    for session, own in enumerate((1.0, 2.0, 3.0, score)):
        queue[f"q_{session}_0"] = row(SINGLE, own)
    step = Step(queue, monkeypatch)
    assert not queue["q_3_0"]["rm_scores"].any()
    assert "q_3_0" in step.left_out
    assert f"sample q_3: the agent loop set the reward {score}" in str(queue["q_3_0"]["extra_fields"])
    assert [float(queue[f"q_{session}_0"]["advantages"].max()) for session in range(3)] == [-1, 0, 1]
    assert step.workers.accepted == 0


def test_invalid_dense_rewards_get_the_default_score_under_the_policy_default(
    rejected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Step(rejected, monkeypatch, "default").metrics
    assert rejected["q_3_0"]["rm_scores"].tolist() == [0, 0, 0, -1]
    assert rejected["q_3_1"]["rm_scores"].tolist() == [0, 0, 0, 0, 0, 0, -1]
    assert float(rejected["q_3_0"]["advantages"].min()) < float(rejected["q_0_0"]["advantages"].min()) < 0
    assert (metrics["reward_loop/scored"], metrics["reward_loop/failed"]) == (3, 1)


def test_a_session_whose_parts_do_not_fit_stops_the_run_if_the_policy_is_raise(
    rejected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardLoopError, match="sample q_3: the function returned 1 turn_level_scores"):
        Step(rejected, monkeypatch, "raise")


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
    fatal: list[str] = []
    raised: list[Exception] = []

    def check_fatal_errors_briefly() -> None:
        if fatal:
            raise RewardLoopError(fatal[0])

    def check_fatal_errors() -> None:
        raise RewardLoopError("a reward worker did not answer within 120 s")

    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        raise raised[-1]

    monkeypatch.setattr(PPOTrainer, "step", step)
    workers = trainers.Workers(
        check_fatal_errors=check_fatal_errors, check_fatal_errors_briefly=check_fatal_errors_briefly
    )
    made = set_up(monkeypatch, constructed(resolved(f"trainer.v1.trainer_mode={mode}")), workers)
    raised.append(ActorDiedError())
    with pytest.raises(RewardLoopError, match=r"a process of the run died.*unexpectedly"):
        made.step({}, {})
    fatal.append("the judge is on strike")
    with pytest.raises(RewardLoopError, match="on strike"):
        made.step({}, {})
    fatal.clear()
    raised.append(ValueError("the update failed"))
    with pytest.raises(ValueError, match="the update failed"):
        made.step({}, {})
