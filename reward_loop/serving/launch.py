"""Finds places for servers, on this machine or in Ray, and creates their processes."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reward_loop._util.sockets import listen, reserve, url_of
from reward_loop.config import RewardModelConfig, ServedModelConfig
from reward_loop.serving.gpus import GpuShares
from reward_loop.serving.models import ENGINES
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import Server

if TYPE_CHECKING:
    from reward_loop.serving.reservation import Place, Placement

__all__ = ["Launch", "Launched", "in_ray", "on_this_machine"]

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launched:
    """One server's place."""

    new_process: Callable[[str, str], Server]
    """Creates the server's next run, from its name for messages and its role, such as ``server 1``."""
    url: str | None = None
    """The server's URL; ``None`` if it is unknown before the start."""
    close: Callable[[], None] | None = None
    """Releases the address."""


Launch = Callable[[ServedModelConfig], Iterator[Launched]]
"""Yields the places of a model's servers."""


def on_this_machine(log_dir: Path, resources: ExitStack) -> Launch:
    """Returns the launch of servers on this machine, each with its own GPUs.

    Args:
        log_dir: the folder for the servers' logs.
        resources: gets the sockets that hold the servers' addresses.
    """
    shares = GpuShares()

    def launch(model: ServedModelConfig) -> Iterator[Launched]:
        engine = ENGINES[model.engine]
        name = str(model.served_model_name)
        for gpus in shares.share(engine.gpus(model), model.replicas, model.env, name):
            bound = resources.enter_context(listen(_HOST) if engine.inherits_socket else reserve(_HOST))

            def new_process(
                name: str, role: str, bound: socket.socket = bound, gpus: dict[str, str] = gpus
            ) -> ServerProcess:
                return ServerProcess(
                    name,
                    engine.command(model, *bound.getsockname()[:2]),
                    bound=bound,
                    env=engine.environment(model) | gpus,
                    log_path=_log_path(log_dir, role),
                    health_path=engine.health_path,
                    start_timeout_s=model.start_timeout_s,
                )

            yield Launched(new_process, url_of(bound), bound.close)

    return launch


async def in_ray(
    config: RewardModelConfig, models: Sequence[ServedModelConfig], gpus: Placement | None, resources: ExitStack
) -> Launch:
    """Finds Ray resources for all servers, and returns their launch in Ray actors.

    Args:
        config: the options.
        models: all models.
        gpus: where the servers run; by default, reserved resources.
        resources: releases the Ray resources when it is closed.

    Raises:
        ConfigError, ServerStartError: there are too few resources.
    """
    # Imported only if Ray is used.
    from reward_loop.serving.ray_server import RayServer
    from reward_loop.serving.reservation import Demand, GpuReservation
    from reward_loop.serving.tunnels import new_key

    gpus = gpus or GpuReservation(timeout_s=config.placement_timeout_s)
    resources.callback(gpus.release)
    started = [model for model in models if model.engine != "external"]
    found = await gpus.places(
        [Demand(model.replicas, ENGINES[model.engine].gpus(model), model.threads) for model in started]
    )
    places = {model.served_model_name: group for model, group in zip(started, found, strict=True)}
    tunnel_key = new_key()

    def launch(model: ServedModelConfig) -> Iterator[Launched]:
        engine = ENGINES[model.engine]
        log_dir = Path(config.log_dir).absolute() if config.log_dir else None  # on the server's node
        for place in places[model.served_model_name]:

            def new_process(name: str, role: str, place: Place = place) -> Server:
                return RayServer(
                    name,
                    functools.partial(engine.command, model),
                    inherits_socket=engine.inherits_socket,
                    place=place,
                    tunnel_key=tunnel_key,
                    env=engine.environment(model),
                    health_path=engine.health_path,
                    start_timeout_s=model.start_timeout_s,
                    log_path=_log_path(log_dir, role) if log_dir else None,
                )

            yield Launched(new_process)

    return launch


def _log_path(folder: Path, role: str) -> Path:
    return folder / f"{role.replace(' ', '-')}.log"
