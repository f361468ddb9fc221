"""The Ray actor that runs verl's trainer and the reward model's servers."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.main_ppo import TaskRunnerV1

from reward_loop.verl import compat
from reward_loop.verl.mode_options import PIPELINE_MODE, has_reward_queue
from reward_loop.verl.resolve import reward_loop_options
from reward_loop.verl.reward_model import reward_model_options

__all__ = ["TaskRunner"]


@ray.remote
class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's V1 task runner, with the reward loop and the reward model."""

    def run(self, config: DictConfig) -> None:
        """Starts the reward model, trains, and stops the reward model, also after an error.

        A colocated reward model is started by the trainer.
        """
        # The imports below need names of verl that another version may lack.
        compat.check(compat.TRAINING, *([compat.CPU] if config.trainer.device == "cpu" else []))
        import transfer_queue as tq
        from verl.trainer.ppo.v1 import get_trainer_cls
        from verl.utils.logging_utils import configure_verl_logging

        from reward_loop.limits.server import serve_limits
        from reward_loop.serving.manager import serve_reward_model
        from reward_loop.serving.reservation import GpuReservation
        from reward_loop.verl.cluster import accelerator, groups_of_trainer
        from reward_loop.verl.colocated import ColocatedRewardModel
        from reward_loop.verl.pipeline import AGENT_LOOP_MANAGER
        from reward_loop.verl.router_address import RouterAddress, router_address
        from reward_loop.verl.separate_async import QUEUE_AGENT_LOOP_MANAGER, QueueSeparateAsyncTrainer
        from reward_loop.verl.trainer import with_reward_loop

        configure_verl_logging()
        logging.getLogger("reward_loop").setLevel(logging.INFO)
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        trainer_class = get_trainer_cls(config.trainer.v1.trainer_mode)
        manager_class = AGENT_LOOP_MANAGER if config.trainer.v1.trainer_mode == PIPELINE_MODE else None
        if has_reward_queue(config):
            trainer_class, manager_class = QueueSeparateAsyncTrainer, QUEUE_AGENT_LOOP_MANAGER
        if manager_class is not None:
            with open_dict(config):
                config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = manager_class
        self.config = config
        with ExitStack() as stack:
            tq.init(config.transfer_queue)
            stack.callback(tq.close)
            address: RouterAddress | str | None = None
            colocated = None
            model = reward_model_options(config)
            if model is not None and model.placement == "colocated":
                colocated = stack.enter_context(ColocatedRewardModel(model, config.reward.num_workers))
            elif model is not None:
                gpus = None
                if model.placement == "ray":
                    # verl's trainer reserves its GPUs later, and waits without a timeout until whole nodes are free.
                    gpus = GpuReservation(
                        groups_of_trainer(config), accelerator=accelerator(), timeout_s=model.placement_timeout_s
                    )
                served = stack.enter_context(serve_reward_model(model, gpus))
                address = stack.enter_context(
                    router_address(served.reward_router_address, model, config.reward.num_workers)
                )
            if config.reward_loop.job is None:
                limits = serve_limits(reward_loop_options(config), _address_of_node())
                config.reward_loop.job = stack.enter_context(limits)
            trainer_cls: Any = with_reward_loop(trainer_class)
            trainer = trainer_cls(config, address, colocated)
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


def _address_of_node() -> str:
    """Returns the address at which all workers reach this process: the loopback address if there is only one node."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ray.util.get_node_ip_address() if len(nodes) > 1 else "127.0.0.1"
