"""The Ray actor that runs verl's trainer with the reward loop."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1

from reward_loop.verl import compat
from reward_loop.verl.mode_options import ModeOptions

__all__ = ["TaskRunner"]


@ray.remote
class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's V1 task runner, with the reward loop and the reward model."""

    def run(self, config: DictConfig) -> None:
        """Starts the services of rewards, trains, and stops the services, also after an error."""
        # The imports below need names that another version of verl may lack.
        compat.check(compat.TRAINING, *([compat.CPU] if config.trainer.device == "cpu" else []))
        import transfer_queue as tq
        from verl.utils.logging_utils import configure_verl_logging

        from reward_loop.verl.services import reward_services
        from reward_loop.verl.trainer import with_reward_loop

        configure_verl_logging()
        logging.getLogger("reward_loop").setLevel(logging.INFO)
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        self.config = config
        with ExitStack() as stack:
            tq.init(config.transfer_queue)
            stack.callback(tq.close)
            rewards = stack.enter_context(reward_services(config))
            trainer = with_reward_loop(_trainer_class(config, rewards.settings.mode))(config, rewards)
            self.trainer = trainer
            succeeded = False
            try:
                trainer.init()
                self.init_agent_loop_manager()
                trainer.fit(self.agent_loop_manager)
                succeeded = True
            finally:
                tracking = getattr(trainer, "logger", None)
                if tracking is not None:
                    tracking.finish(exit_code=0 if succeeded else 1)


def _trainer_class(config: DictConfig, mode: ModeOptions) -> Any:
    """Returns the trainer class of the mode. Sets the agent loop manager in ``config`` if the mode needs its own."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    from reward_loop.verl.pipeline import AGENT_LOOP_MANAGER
    from reward_loop.verl.separate_async import QUEUE_AGENT_LOOP_MANAGER, QueueSeparateAsyncTrainer

    agent = config.actor_rollout_ref.rollout.agent
    with open_dict(agent):
        if mode.queue is not None:
            agent.agent_loop_manager_class = QUEUE_AGENT_LOOP_MANAGER
            return QueueSeparateAsyncTrainer
        if mode.pipeline is not None:
            agent.agent_loop_manager_class = AGENT_LOOP_MANAGER
    return get_trainer_cls(mode.name)
