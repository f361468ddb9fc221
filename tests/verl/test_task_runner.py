"""What the task runner starts, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from reward_loop.verl.run import services
from reward_loop.verl.run.services import RewardServices
from reward_loop.verl.run.task_runner import TaskRunner, _trainer_class
from reward_loop.verl.trainer.pipeline import RewardPipelineTrainer
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer
from reward_loop.verl.trainer.reward_loop_trainer import RewardLoopTrainer, with_reward_loop
from reward_loop.verl.trainer.separate_async import QUEUE_AGENT_LOOP_MANAGER, QueueSeparateAsyncTrainer
from reward_loop.verl.workers.agent_loop import AGENT_LOOP_MANAGER
from tests.verl.configs import resolved, settled

pytestmark = pytest.mark.integration  # imports verl


def agent_loop_manager(config: DictConfig) -> Any:
    return config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")


@pytest.mark.parametrize(
    ("mode", "trainer", "manager"),
    [
        ("sync", PPOTrainerSync, AGENT_LOOP_MANAGER),
        ("reward_pipeline", RewardPipelineTrainer, AGENT_LOOP_MANAGER),
        ("separate_async", QueueSeparateAsyncTrainer, QUEUE_AGENT_LOOP_MANAGER),
    ],
)
def test_each_mode_has_its_trainer_and_agent_loop_manager(mode: str, trainer: type, manager: str | None) -> None:
    settings = resolved(f"trainer.v1.trainer_mode={mode}")
    assert _trainer_class(settings.config, settings.mode) is trainer
    assert agent_loop_manager(settings.config) == manager


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "reward_pipeline", "separate_async"])
def test_the_trainer_of_each_mode_gets_its_settings_from_the_services(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    rollout = "actor_rollout_ref.rollout"
    settings = resolved(
        f"trainer.v1.trainer_mode={mode}",
        "trainer.v1.sampler.poll_interval_s=0.7",
        *(f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=1", f"{rollout}.checkpoint_engine.backend=nccl"),
    )
    polls: list[str] = []
    job: Any = SimpleNamespace(check=lambda: polls.append("why stopped"))
    trainer: Any = with_reward_loop(_trainer_class(settings.config, settings.mode))(
        settings.config, RewardServices(settings, job)
    )
    assert isinstance(trainer.replay_buffer, RewardReplayBuffer)
    pauses: list[float] = []
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.time.sleep", pauses.append)
    trainer.replay_buffer._wait_for_next_poll("train", 0.0)
    assert (pauses, polls) == ([0.7], ["why stopped"])
    # verl's own reward workers are off in its copy of the configuration.
    assert (trainer.config.reward.num_workers, settings.num_workers) == (0, 8)


def test_verls_task_runner_gets_our_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Any] = []

    def run(self: Any, config: DictConfig) -> None:
        trainers.append(get_trainer_cls(config.trainer.v1.trainer_mode)(config=config))

    monkeypatch.setattr(TaskRunnerV1.__ray_actor_class__, "run", run)
    monkeypatch.setitem(TRAINER_REGISTRY, "sync", PPOTrainerSync)
    monkeypatch.setattr(
        services, "RunningJob", lambda *_: SimpleNamespace(check=None, close=lambda: trainers.append("closed"))
    )
    TaskRunner.__ray_actor_class__().run(settled())
    trainer, closed = trainers
    assert isinstance(trainer, RewardLoopTrainer)
    assert isinstance(trainer, PPOTrainerSync)
    assert closed == "closed"
