"""The services of a run with rewards: the job's actor, and the servers of the reward model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import DictConfig

from reward_loop.config import LimitConfig, RewardModelConfig
from reward_loop.limits import REWARD_MODEL
from reward_loop.serving.manager import serve_reward_model
from reward_loop.serving.ray_server import GpuReservation
from reward_loop.verl.options import RewardSettings, read
from reward_loop.verl.run.job import RunningJob

if TYPE_CHECKING:
    from reward_loop.verl.run.colocated import ColocatedRewardModel

__all__ = ["RewardServices", "reward_services", "with_limits_of_models"]


PLACES = 64
"""The number of function calls that ask a replica of a reward model at the same time."""


@dataclass(frozen=True, slots=True)
class RewardServices:
    """The settings of rewards, and the services that run."""

    settings: RewardSettings
    job: RunningJob
    """What is true of the whole job."""
    router: str | None = None
    """The ``host:port`` of the router in front of the reward model, if its servers run."""
    colocated: ColocatedRewardModel | None = None
    """The reward model on the trainer's GPUs, which the trainer starts itself."""


@contextmanager
def reward_services(config: DictConfig) -> Iterator[RewardServices]:
    """Start the reward model and the job's actor, and stop them at exit. Call it in the task runner.

    A reward model on the trainer's GPUs is started later, by the trainer, and stopped here.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.options.resolve`.

    Raises:
        ConfigError, ServerStartError: as :class:`RewardModelManager` does on entry.
    """
    settings = read(config)
    with ExitStack() as stack:
        router = colocated = None
        model = settings.model
        if model is not None and model.placement == "colocated":
            from reward_loop.verl.run.colocated import ColocatedRewardModel  # imports verl's engines

            colocated = stack.enter_context(ColocatedRewardModel(config, model))
        elif model is not None:
            model, trusted = reachable(model)
            served = serve_reward_model(model, _reservation(config, model), trusted_addresses=trusted)
            router = stack.enter_context(served).reward_router_address
        if model is not None:
            settings = with_limits_of_models(settings)
        job = RunningJob(settings.options, settings.options.worker_answer_timeout_s)
        stack.callback(job.close)
        yield RewardServices(settings, job, router, colocated)


def with_limits_of_models(settings: RewardSettings) -> RewardSettings:
    """Return the settings with the limits and deadlines of the models that the run serves.

    Each replica has `PLACES` for the function calls that ask a reward model at the same time, or as many as its batch
    has. Otherwise, all rollouts of a batch would ask at once, and wait in the queues of the servers while their
    deadlines run. What the user has set of the limit stays.
    """
    model = settings.model
    assert model is not None
    options = type(settings.options)(**{**dict(settings.options), "models": model.requests()})
    settings = replace(settings, options=options)
    # Without `max_wait`, so that a full judge fails no sample: a call waits while others run, which have deadlines.
    # A worker that is lost gives its permits back (`Job.lose`).
    given = options.limits[REWARD_MODEL].model_dump(exclude_unset=True) if REWARD_MODEL in options.limits else {}
    models = (model, *model.models.values())
    places = sum(
        min(PLACES, one.max_batch_size) * (len(one.urls) or one.replicas * one.data_parallel_size) for one in models
    )
    limit = LimitConfig(**{"max_concurrent": places, "max_wait": None, **given})
    return replace(settings, options=options.model_copy(update={"limits": {**options.limits, REWARD_MODEL: limit}}))


def _reservation(config: DictConfig, model: RewardModelConfig) -> GpuReservation | None:
    if all(one.placement != "ray" for one in (model, *model.models.values())):
        return None
    # verl's trainer reserves its GPUs later, and waits without a timeout until whole nodes are free.
    return GpuReservation(
        groups_of_trainer(config),
        timeout_s=model.placement_timeout_s,
        fix="Lower reward_model.n_gpus_per_node or trainer.n_gpus_per_node, for example to 4 and 4 on one node with 8 "
        "GPUs; or set reward_model.enable_resource_pool=False: the reward model then shares the trainer's GPUs; or add "
        "nodes",
    )


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def worker_nodes(count: int) -> list[str]:
    """Return the Ray node id for each of ``count`` reward workers: this node first, then the others in turn."""
    here = ray.get_runtime_context().get_node_id()
    # As verl does for agent loop workers: not on nodes without CPUs, such as a head node that only coordinates.
    alive = [node["NodeID"] for node in _alive() if node["Resources"].get("CPU", 0) > 0]
    nodes = sorted(alive, key=lambda node: node != here)
    return [nodes[i % len(nodes)] for i in range(count)]


def reachable(model: RewardModelConfig) -> tuple[RewardModelConfig, list[str]]:
    """Make the router reachable for the reward workers of all nodes.

    Returns:
        The options with the address of this node as the router's, if there are several nodes and the user has not
        chosen another; and the addresses whose requests need no API key, because functions for verl send none.
    """
    addresses = [str(node["NodeManagerAddress"]) for node in _alive()]
    if len(addresses) < 2:
        return model, []
    if model.host == RewardModelConfig.model_fields["host"].default:
        model = model.model_copy(update={"host": ray.util.get_node_ip_address()})
    return model, addresses


def groups_of_trainer(config: DictConfig) -> list[int]:
    """Return the GPUs of each placement group that verl's trainer will create, each on one node.

    Args:
        config: verl's whole configuration, after :func:`~reward_loop.verl.options.resolve`.
    """
    groups = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    if config.trainer.v1.trainer_mode == "separate_async":
        rollout = config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        per_node = min(rollout.n_gpus_per_node, size)
        groups += [per_node] * (rollout.n_gpus_per_node * rollout.nnodes // size * (size // per_node))
    teacher = config.get("distillation")
    if teacher is not None and teacher.enabled:
        groups += [teacher.n_gpus_per_node] * teacher.nnodes
    return [gpus for gpus in groups if gpus]
