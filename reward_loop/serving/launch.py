"""The places of servers: on this machine or in Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from reward_loop.serving.gpus import GpuShares
from reward_loop.serving.server_spec import ServerSpec
from reward_loop.serving.supervisor import Server

if TYPE_CHECKING:
    from reward_loop.serving.reservation import Placement

__all__ = ["Launch", "in_ray", "on_this_machine"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A server with a place to run."""

    spec: ServerSpec
    new_process: Callable[[], Server]
    """Creates the server's next run."""
    bound: socket.socket | None = None
    """The socket that holds the server's address; ``None`` in Ray, where each run has its own."""


def on_this_machine(specs: Sequence[Sequence[ServerSpec]]) -> Iterator[Launch]:
    """Yields the servers of each model as processes of this machine, each with its own GPUs.

    Raises:
        ConfigError: there are too few GPUs.
    """
    shares = GpuShares()
    for servers in specs:
        model = servers[0].model
        devices = shares.share(servers[0].gpus, len(servers), model.env, str(model.served_model_name))
        for spec, visible in zip(servers, devices, strict=True):
            bound = spec.bind()
            yield Launch(spec, partial(spec.process, bound, visible), bound)


async def in_ray(specs: Sequence[Sequence[ServerSpec]], placement: Placement) -> list[Launch]:
    """Returns the servers of each model as Ray actors.

    Raises:
        ConfigError, ServerStartError: there are too few resources.
    """
    # Imported only if Ray is used.
    from reward_loop.serving.ray_server import RayServer
    from reward_loop.serving.reservation import Demand
    from reward_loop.serving.tunnels import new_key

    places = await placement.places(
        [Demand(len(servers), servers[0].gpus, servers[0].model.threads) for servers in specs]
    )
    tunnel_key = new_key()
    return [
        Launch(spec, partial(RayServer, spec, place, tunnel_key))
        for servers, found in zip(specs, places, strict=True)
        for spec, place in zip(servers, found, strict=True)
    ]
