"""The resources of the cluster that verl's trainer will reserve, and what verl's platform determines for servers."""

from __future__ import annotations

from omegaconf import DictConfig

from reward_loop.config import RewardModelConfig
from reward_loop.serving.gpus import Accelerator
from reward_loop.serving.reservation import Others
from reward_loop.verl.compat import uses

__all__ = ["accelerator", "for_platform", "groups_of_trainer"]

uses(__name__, "verl.plugin.platform", "get_platform()")
uses(__name__, "verl.single_controller.ray:ResourcePoolManager", "max_colocate_count")

_CPUS_OF_STANDALONE_ROLLOUT = 2
"""verl's ``max_colocate_count`` for rollouts with their own accelerators: the CPUs reserved per accelerator."""


def accelerator() -> Accelerator:
    """Returns the Ray resource and the environment variable for the accelerators of verl's platform."""
    from verl.plugin.platform import get_platform

    platform = get_platform()
    return Accelerator(platform.ray_resource_name(), platform.visible_devices_envvar())


def for_platform(model: RewardModelConfig) -> RewardModelConfig:
    """Returns the options with the environment variables that verl's platform sets for inference engines.

    The user's variables take precedence.
    """
    from verl.plugin.platform import get_platform

    variables = get_platform().rollout_env_vars()
    models = {name: one.model_copy(update={"env": variables | one.env}) for name, one in model.models.items()}
    return model.model_copy(update={"env": variables | model.env, "models": models})


def groups_of_trainer(config: DictConfig) -> list[Others]:
    """Returns the placement groups that verl's trainer will create. verl waits for their resources without a timeout.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.resolve.resolve`.
    """
    from verl.single_controller.ray import ResourcePoolManager

    resource = accelerator().resource

    def pool(name: str, nodes: int, per_node: int, cpus: int = ResourcePoolManager.max_colocate_count) -> Others:
        return Others(name, nodes, per_node, {"CPU": cpus, resource: 1})

    groups = [pool("group(s) of the trainer", config.trainer.nnodes, config.trainer.n_gpus_per_node)]
    if config.trainer.v1.trainer_mode == "separate_async":
        rollout = config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        per_node = min(rollout.n_gpus_per_node, size)
        nodes = rollout.n_gpus_per_node * rollout.nnodes // size * (size // per_node)
        groups.append(pool("group(s) of the rollout", nodes, per_node, _CPUS_OF_STANDALONE_ROLLOUT))
    teacher = config.get("distillation")
    if teacher is not None and teacher.enabled:
        groups.append(pool("group(s) of the teacher", teacher.nnodes, teacher.n_gpus_per_node))
    return [group for group in groups if group.groups and group.bundles]
