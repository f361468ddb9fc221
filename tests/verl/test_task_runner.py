"""What the task runner starts, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync

from reward_loop.verl.run import services
from reward_loop.verl.run.services import RewardServices
from reward_loop.verl.run.task_runner import TaskRunner, _trainer_class
from reward_loop.verl.trainer.pipeline import RewardPipelineTrainer
from reward_loop.verl.trainer.replay_buffer import RewardReplayBuffer
from reward_loop.verl.trainer.reward_loop_trainer import RewardLoopTrainer, with_reward_loop
from reward_loop.verl.trainer.separate_async import QUEUE_AGENT_LOOP_MANAGER, QueueSeparateAsyncTrainer
from reward_loop.verl.workers.agent_loop import AGENT_LOOP_MANAGER
from tests.verl.configs import ROLLOUT_ELSEWHERE, resolved, settled

pytestmark = pytest.mark.integration  # imports verl


@pytest.mark.parametrize(
    ("mode", "cls", "manager"),
    [
        ("sync", PPOTrainerSync, AGENT_LOOP_MANAGER),
        ("colocate_async", PPOTrainerColocateAsync, AGENT_LOOP_MANAGER),
        ("reward_pipeline", RewardPipelineTrainer, AGENT_LOOP_MANAGER),
        ("separate_async", QueueSeparateAsyncTrainer, QUEUE_AGENT_LOOP_MANAGER),
    ],
)
def test_each_mode_has_its_agent_loop_manager_and_its_trainer_with_the_settings_of_the_services(
    monkeypatch: pytest.MonkeyPatch, mode: str, cls: Any, manager: str
) -> None:
    options = (f"trainer.v1.trainer_mode={mode}", "trainer.v1.sampler.poll_interval_s=0.7")
    settings = resolved(*options, *ROLLOUT_ELSEWHERE)
    assert _trainer_class(settings.config, settings.mode) is cls
    assert settings.config.actor_rollout_ref.rollout.agent.agent_loop_manager_class == manager
    polls: list[str] = []
    job: Any = SimpleNamespace(check=lambda: polls.append("why stopped"))
    trainer: Any = with_reward_loop(cls)(settings.config, RewardServices(settings, job))
    assert isinstance(trainer.replay_buffer, RewardReplayBuffer)
    pauses: list[float] = []
    monkeypatch.setattr("verl.trainer.ppo.v1.replay_buffer.time.sleep", pauses.append)
    trainer.replay_buffer._wait_for_next_poll("train", 0.0)
    assert (pauses, polls) == ([0.7], ["why stopped"])
    # verl's own reward workers are off in its copy of the configuration.
    own = trainer.config.reward
    assert (own.num_workers, own.reward_model.enable, settings.config.reward.num_workers) == (0, False, 8)


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
