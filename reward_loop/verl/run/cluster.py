"""The cluster of a run: its nodes, where reward workers run, and what verl's trainer will reserve."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig

from reward_loop.config import RewardModelConfig


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
