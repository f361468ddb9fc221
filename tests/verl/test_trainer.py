"""What the trainer does with rewards, and in which order it starts, without a run: TransferQueue is a dict here."""

from __future__ import annotations

import math
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from reward_loop.errors import RewardLoopError
from reward_loop.verl import tq_rows
from reward_loop.verl.run import task_runner
from reward_loop.verl.tq_rows import token_rewards, turns_of
from reward_loop.verl.trainer import reward_loop_trainer
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


SCORED = {"reward_outcome": "scored", "reward_masked": False, "reward_error": ""}


def test_rewards_of_a_batch_are_written_to_all_outputs_and_parts_to_the_last(queue: FakeQueue) -> None:
    for key, score, mask in (("q_0_0", 0.0, SINGLE), ("q_0_1", 0.0, TOOL), ("q_2_0", 5.0, SINGLE)):
        queue.put(key, score, SCORED, mask)
        queue.rows[key]["extra_fields"]["turns"] = 1
    batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=[{} for _ in queue.rows])
    info = {"turn_level_scores": [1.0, 0.5], "reward_outcome": "scored"}
    tq_rows.write_rewards(batch, ["q_0_1"], [{"reward_score": 2.0, "reward_extra_info": info}])
    assert queue.rows["q_0_0"]["rm_scores"].tolist() == [0, 0, 0, 2]  # an earlier output
    assert queue.rows["q_0_1"]["rm_scores"].tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert queue.rows["q_2_0"]["rm_scores"].tolist() == [0, 0, 0, 5]
    assert queue.rows["q_0_0"]["extra_fields"] == {"turns": 1, "reward_extra_info": info}


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
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is padded to a mini-batch of the critic, which is four of the actor."""
    for session in range(3):
        queue.put(f"q_{session}_0", float(session), SCORED, SINGLE)
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=8")
    made = set_up(monkeypatch, constructed(resolved(*sizes, "actor_rollout_ref.rollout.n=4")))
    made._rewards.trained = learners = set(queue.rows)
    updates: dict[str, list[str]] = {}
    for name in ("_update_actor", "_update_critic"):
        monkeypatch.setattr(PPOTrainer, name, lambda self, rows, metrics, name=name: updates.update({name: rows.keys}))
        keys = [*queue.rows, *(f"pad_{number}_0" for number in range(29))]
        getattr(made, name)(KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), {})
    assert {name: len(rows) for name, rows in updates.items()} == {"_update_actor": 8, "_update_critic": 32}
    assert all(learners < set(rows) for rows in updates.values())


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


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []

    def note(event: str, result: Any = None) -> Any:
        return lambda *_, **__: (events.append(event), result)[1]

    class Workers:
        def __init__(self, **_: Any) -> None:
            self.init_model = note("the trainer's model is loaded")
            self.update_actor = note("an update")

        def spawn(self, prefix_set: Any) -> dict[str, Any]:
            return dict.fromkeys(prefix_set, self)

    client = SimpleNamespace(by_group=False)
    reward_workers = SimpleNamespace(client=client, wait_until_ready=lambda: None)
    rollout = SimpleNamespace(get_replicas=list)
    monkeypatch.setattr(trainer_base, "RewardLoopManager", note("verl's own reward loop manager starts"))
    monkeypatch.setattr(trainer_base, "RayWorkerGroup", Workers)
    monkeypatch.setattr(trainer_base, "create_colocated_worker_cls", lambda class_dict: None)
    monkeypatch.setattr(trainer_base, "LLMServerManager", SimpleNamespace(create=note("the rollout starts", rollout)))
    replicas = SimpleNamespace(sleep_replicas=note("the rollout sleeps"))
    monkeypatch.setattr(trainer_base, "CheckpointEngineManager", lambda **_: replicas)
    monkeypatch.setattr(reward_loop_trainer, "RewardWorkers", note("the reward workers start", reward_workers))
    monkeypatch.setattr(reward_loop_trainer, "StepHealth", lambda *_: None)
    return events


def test_a_reward_model_on_the_trainers_gpus_starts_before_the_rollout_sizes_its_cache(events: list[str]) -> None:
    """verl's own set-up of a trainer, with stand-ins for what needs GPUs."""

    class Colocated:
        def start(self, pool: str) -> str:
            events.append(f"the reward model starts on the {pool}, and sleeps")
            return "127.0.0.1:1"

    settings = resolved("trainer.device=cuda")
    made = constructed(settings, colocated=Colocated())
    made.total_training_steps = 7
    made.use_critic = made.use_reference_policy = made.use_teacher_policy = False
    made.role_worker_mapping = {reward_loop_trainer.Role.ActorRollout: object}
    pool = "trainer's pool"
    made.resource_pool_manager = SimpleNamespace(
        create_resource_pool=lambda: None, get_resource_pool=lambda role: pool, resource_pool_dict={"pool": pool}
    )
    for name in ("tokenizer", "dataloader", "dump_executor", "resource_pool_mgr"):
        setattr(made, f"_init_{name}", lambda: None)
    made._load_checkpoint = lambda: None
    made.tokenizer = SimpleNamespace(decode=str)
    verls = trainer_base.RewardLoopManager
    made._setup()
    assert trainer_base.RewardLoopManager is verls
    # The agent loop workers, which get this configuration, pass it to the reward workers.
    assert settings.config.trainer.total_training_steps == 7
    assert events == [
        "the trainer's model is loaded",
        "the reward model starts on the trainer's pool, and sleeps",
        "the reward workers start",
        "the rollout starts",
        "the rollout sleeps",
    ]
    assert made.get_reward_handles() is None, "verl scores the whole batch, after the rollout"
