"""verl's own set-up of a trainer, with stand-ins for what needs GPUs: when a colocated reward model starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import trainer_base

from reward_loop.verl.trainer import reward_loop_trainer as trainer
from tests.verl.configs import resolved
from tests.verl.trainers import constructed

pytestmark = pytest.mark.integration  # imports verl


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
    monkeypatch.setattr(trainer, "RewardWorkers", note("the reward workers start", reward_workers))
    monkeypatch.setattr(trainer, "StepHealth", lambda *_: None)
    return events


def set_up(events: list[str], *, colocated: bool) -> Any:
    class Colocated:
        def start(self, pool: str) -> str:
            events.append(f"the reward model starts on the {pool}, and sleeps")
            return "127.0.0.1:1"

    settings = resolved("trainer.device=cuda")
    made = constructed(settings, colocated=Colocated() if colocated else None)
    made.total_training_steps = 7
    made.use_critic = made.use_reference_policy = made.use_teacher_policy = False
    made.role_worker_mapping = {trainer.Role.ActorRollout: object}
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
    return made


def test_a_reward_model_on_the_trainers_gpus_starts_before_the_rollout_sizes_its_cache(events: list[str]) -> None:
    made = set_up(events, colocated=True)
    assert events == [
        "the trainer's model is loaded",
        "the reward model starts on the trainer's pool, and sleeps",
        "the reward workers start",
        "the rollout starts",
        "the rollout sleeps",
    ]
    assert made.get_reward_handles() is None, "verl scores the whole batch, after the rollout"
