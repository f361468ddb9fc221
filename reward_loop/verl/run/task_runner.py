"""The Ray actor that runs verl's trainer with the reward loop."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import override
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

import reward_loop.verl.trainer.pipeline  # noqa: F401  registers the mode reward_pipeline
from reward_loop.verl.options import ModeOptions
from reward_loop.verl.run.services import reward_services
from reward_loop.verl.trainer.reward_loop_trainer import with_reward_loop
from reward_loop.verl.trainer.separate_async import QUEUE_AGENT_LOOP_MANAGER, QueueSeparateAsyncTrainer
from reward_loop.verl.workers.agent_loop import AGENT_LOOP_MANAGER

if TYPE_CHECKING:
    _TaskRunner = TaskRunnerV1
else:
    _TaskRunner = TaskRunnerV1.__ray_actor_class__


@ray.remote
class TaskRunner(_TaskRunner):
    """verl's V1 task runner, with the reward loop and the reward model."""

    @override
    def run(self, config: DictConfig) -> None:
        """Start the services of rewards, train as verl's task runner does, and stop the services.

        The services stop also after an error.
        """
        logging.getLogger("reward_loop").setLevel(logging.INFO)
        OmegaConf.resolve(config)
        with reward_services(config) as rewards:
            mode = rewards.settings.mode
            # verl looks the trainer up by the mode, in this process only, and calls it with the configuration.
            trainer: Any = partial(with_reward_loop(_trainer_class(config, mode)), rewards=rewards)
            # By its module: Ray sends this class by value, with a copy of a dict that it names.
            trainer_base.TRAINER_REGISTRY[mode.name] = trainer
            super().run(config)


def _trainer_class(config: DictConfig, mode: ModeOptions) -> Any:
    """Return the trainer class of the mode. Sets the agent loop manager in ``config``, except one of the user."""
    agent = config.actor_rollout_ref.rollout.agent
    with open_dict(agent):
        if mode.queue is not None:
            agent.agent_loop_manager_class = QUEUE_AGENT_LOOP_MANAGER
            return QueueSeparateAsyncTrainer
        if agent.get("agent_loop_manager_class") is None:
            agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
    return get_trainer_cls(mode.name)
