"""The loopback address at which reward functions reach the router, on every node. They need no key.

The router runs on one node. If reward workers also run on other nodes, a tunnel connects each of those to the router
(:mod:`reward_loop.serving.tunnels`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from reward_loop._util.background_loop import in_background
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ServerStartError
from reward_loop.serving.tunnels import new_key, tunnel_entry, tunnel_exit

__all__ = ["RouterAddress", "address_on_this_node", "router_address", "worker_nodes"]


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
    """Returns the Ray node id for each of ``count`` reward workers: this node first, then the others in turn."""
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
    nodes = sorted(alive, key=lambda node: node != here)
    return [nodes[i % len(nodes)] for i in range(count)]


@contextmanager
def router_address(address: str, served: RewardModelConfig, workers: int) -> Iterator[RouterAddress]:
    """Makes a router on this node reachable for reward workers on other nodes, if there are any.

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
    """Yields the ``host:port`` at which this process reaches the router; ``None`` if ``router`` is ``None``.

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
