"""The cluster of a run: its nodes, what verl's trainer will reserve, and how workers reach the router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray
from omegaconf import DictConfig

from reward_loop._util.event_loops import in_background
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ServerStartError
from reward_loop.serving.gpus import Accelerator
from reward_loop.serving.reservation import Others
from reward_loop.serving.tunnels import new_key, tunnel_entry, tunnel_exit
from reward_loop.verl.compat import uses

uses(__name__, "verl.plugin.platform", "get_platform()")
uses(__name__, "verl.single_controller.ray:ResourcePoolManager", "max_colocate_count")

_CPUS_OF_STANDALONE_ROLLOUT = 2
"""verl's ``max_colocate_count`` for rollouts with their own accelerators: the CPUs reserved per accelerator."""


def accelerator() -> Accelerator:
    """Return the Ray resource and the environment variable for the accelerators of verl's platform."""
    from verl.plugin.platform import get_platform

    platform = get_platform()
    return Accelerator(platform.ray_resource_name(), platform.visible_devices_envvar())


def for_platform(model: RewardModelConfig) -> RewardModelConfig:
    """Return the options with the environment variables that verl's platform sets for inference engines.

    The user's variables take precedence.
    """
    from verl.plugin.platform import get_platform

    variables = get_platform().rollout_env_vars()
    models = {name: one.model_copy(update={"env": variables | one.env}) for name, one in model.models.items()}
    return model.model_copy(update={"env": variables | model.env, "models": models})


def groups_of_trainer(config: DictConfig) -> list[Others]:
    """Return the placement groups that verl's trainer will create. verl waits for their resources without a timeout.

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


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """The address of a router, for reward workers on all nodes."""

    address: str
    """The router's ``host:port``."""
    node: str | None = None
    """The Ray id of the router's node, if the router listens on loopback."""
    exit: str | None = None
    """``host:port`` of the tunnel's exit, for other nodes; ``None`` without a tunnel."""
    key: str = field(default="", repr=False)
    """The key of the tunnel."""


def worker_nodes(count: int) -> list[str]:
    """Return the Ray node id for each of ``count`` reward workers: this node first, then the others in turn."""
    here = ray.get_runtime_context().get_node_id()
    # As verl does for agent loop workers: not on nodes without CPUs, such as a head node that only coordinates.
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
    nodes = sorted(alive, key=lambda node: node != here)
    return [nodes[i % len(nodes)] for i in range(count)]


@contextmanager
def router_address(address: str, served: RewardModelConfig, workers: int) -> Iterator[RouterAddress]:
    """Make a router on this node reachable for reward workers on other nodes, if there are any.

    Args:
        address: the router's ``host:port``.
        served: how the reward model is served.
        workers: the number of reward workers.

    Raises:
        ServerStartError: the tunnel's exit could not be opened.
    """
    if served.host != RewardModelConfig.model_fields["host"].default:
        yield RouterAddress(address)  # the user has chosen an address that all nodes reach
        return
    here = ray.get_runtime_context().get_node_id()
    # No worker elsewhere needs the router: open nothing to other nodes.
    if set(worker_nodes(workers)) <= {here}:
        yield RouterAddress(address, here)
        return
    key = new_key()
    with in_background(
        lambda: tunnel_exit(ray.util.get_node_ip_address(), address, key), name="reward-router-tunnel"
    ) as exit_address:
        yield RouterAddress(address, here, exit_address, key)


@contextmanager
def address_on_this_node(router: RouterAddress | None) -> Iterator[str | None]:
    """Yield the ``host:port`` at which this process reaches the router; ``None`` if ``router`` is ``None``.

    Raises:
        ServerStartError: the router is on another node, and has no tunnel.
    """
    if router is None:
        yield None
        return
    # Without a node, Ray is not asked: the question would start a Ray where there is none.
    if router.node is None or router.node == ray.get_runtime_context().get_node_id():
        yield router.address
        return
    if router.exit is None:
        raise ServerStartError(
            f"the router on node {router.node} is reachable only from that node, because all reward workers were "
            "there when the run started. Ray has restarted this reward worker on another node. Resume from a checkpoint"
        )
    exit_address, key = router.exit, router.key
    with in_background(
        lambda: tunnel_entry(exit_address, key, health_path="/live"), name="reward-router-tunnel"
    ) as address:
        yield address
