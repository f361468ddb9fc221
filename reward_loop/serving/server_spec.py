"""What a server of a model is, and how it runs on this machine."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reward_loop._util.web_server import is_taken, listen, reserve, url_of
from reward_loop.serving.engines import ENGINES, Engine
from reward_loop.serving.gpus import GpuShares
from reward_loop.serving.options import ServedModelConfig
from reward_loop.serving.process import ServerProcess
from reward_loop.serving.supervisor import Server

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server of a model. It is pickled for servers in Ray."""

    model: ServedModelConfig
    engine: Engine
    name: str
    """The name in messages, such as ``reward model server 1/2``."""
    number: int
    """The number among the servers of all models, from 1."""
    log_dir: Path | None
    """The folder of the log, on the server's node; ``None`` for a new temporary folder."""

    @property
    def role(self) -> str:
        """A short name, such as ``server 1``."""
        return f"server {self.number}"

    @property
    def gpus(self) -> int:
        """The number of GPUs of the server."""
        return self.engine.gpus(self.model)

    def bind(self, host: str = LOOPBACK) -> socket.socket:
        """Return a socket with a free port of a host, as :class:`ServerProcess` expects it."""
        return listen(host) if self.engine.inherits_socket else reserve(host)

    def process(
        self, bound: socket.socket, devices: Mapping[str, str], where: str = "", api_key: str | None = None
    ) -> ServerProcess:
        """Return a run of the server on this machine.

        Args:
            bound: the address, from :meth:`bind`.
            devices: the environment variables that assign GPUs to the server.
            where: appended to the name in messages.
            api_key: the key that the server asks for.
        """
        arguments, variables = ([], {}) if api_key is None else self.engine.with_key(api_key)
        return ServerProcess(
            self.name + where,
            [*self.engine.command(self.model, *bound.getsockname()[:2]), *arguments],
            bound=bound,
            env={**self.engine.environment(self.model), **devices, **variables},
            log_path=self.log_dir and self.log_dir / f"server-{self.number}.log",
            start_timeout_s=self.model.start_timeout_s,
        )


def server_specs(
    models: Sequence[ServedModelConfig], log_dir: Path | None, *, is_shared: bool = True
) -> list[list[ServerSpec]]:
    """Return the servers of each model, without those of external models, which run already.

    Args:
        models: the models.
        log_dir: the folder of their logs.
        is_shared: whether other nodes have this folder; if not, servers in Ray log to a temporary one of their node.
    """
    numbers = itertools.count(1)
    specs = []
    for model in models:
        if model.engine == "external":
            continue
        of = f" of {model.served_model_name}" if len(models) > 1 else ""
        names = [f"reward model server {replica}/{model.replicas}{of}" for replica in range(1, model.replicas + 1)]
        logs = log_dir if is_shared or model.placement == "local" else None
        specs.append([ServerSpec(model, ENGINES[model.engine], name, next(numbers), logs) for name in names])
    return specs


@dataclass(frozen=True, slots=True)
class Launch:
    """A server with a place to run."""

    spec: ServerSpec
    new_process: Callable[[], Server]
    """Creates the server's next run."""
    address: LocalAddress | None = None
    """The server's address; ``None`` in Ray, where each run has its own."""


class LocalAddress:
    """The address of a server on this machine: the same for all its runs, unless another program takes the port.

    Args:
        spec: the server.
        devices: as for :meth:`ServerSpec.process`.
    """

    def __init__(self, spec: ServerSpec, devices: Mapping[str, str]) -> None:
        self._spec = spec
        self._devices = devices
        self._bound = spec.bind()

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return url_of(self._bound)

    def new_process(self) -> ServerProcess:
        """Return the next run of the server."""
        # The engine binds the port itself, seconds later: another program may bind it by its number meanwhile.
        if not self._spec.engine.inherits_socket and is_taken(self._bound):
            taken, self._bound = self._bound, self._spec.bind()
            logger.warning("%s: another program listens on %s; using %s", self._spec.name, url_of(taken), self.url)
            taken.close()
        return self._spec.process(self._bound, self._devices)

    def close(self) -> None:
        """Release the address."""
        self._bound.close()


def on_this_machine(specs: Sequence[Sequence[ServerSpec]]) -> Iterator[Launch]:
    """Yield the servers of each model as processes of this machine, each with its own GPUs.

    Raises:
        ConfigError: there are too few GPUs.
    """
    shares = GpuShares()
    for servers in specs:
        model = servers[0].model
        devices = shares.share(servers[0].gpus, len(servers), model.env, str(model.served_model_name))
        for spec, visible in zip(servers, devices, strict=True):
            address = LocalAddress(spec, visible)
            yield Launch(spec, address.new_process, address)
