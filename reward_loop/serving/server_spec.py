"""What a server of a model is, and how it runs on this machine."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from reward_loop._util.web_server import listen, reserve
from reward_loop.errors import ConfigError
from reward_loop.serving.engines import ENGINES, Engine
from reward_loop.serving.options import ServedModelConfig
from reward_loop.serving.process import ServerProcess

if TYPE_CHECKING:
    from reward_loop.serving.supervisor import Server

LOOPBACK = "127.0.0.1"

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable that restricts a process to some GPUs."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server of a model. It is pickled for servers in Ray."""

    model: ServedModelConfig
    engine: Engine
    name: str
    """The name in messages, such as ``reward model server 1/2``."""
    number: int
    """The number among the servers of all models, from 1."""
    log_dir: Path
    """The folder of the log, on the server's node."""

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
            log_path=self.log_dir / f"server-{self.number}.log",
            start_timeout_s=self.model.start_timeout_s,
        )


def server_specs(models: Sequence[ServedModelConfig], log_dir: Path) -> list[list[ServerSpec]]:
    """Return the servers of each model, without those of external models, which run already."""
    numbers = itertools.count(1)
    specs = []
    for model in models:
        if model.engine == "external":
            continue
        of = f" of {model.served_model_name}" if len(models) > 1 else ""
        names = [f"reward model server {replica}/{model.replicas}{of}" for replica in range(1, model.replicas + 1)]
        specs.append([ServerSpec(model, ENGINES[model.engine], name, next(numbers), log_dir) for name in names])
    return specs


@dataclass(frozen=True, slots=True)
class Launch:
    """A server with a place to run."""

    spec: ServerSpec
    new_process: Callable[[], Server]
    """Creates the server's next run."""
    bound: socket.socket | None = None
    """The server's address; ``None`` in Ray, where each run has its own."""


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
            bound = spec.bind()
            yield Launch(spec, partial(spec.process, bound, visible), bound)


class GpuShares:
    """Assigns this machine's GPUs to servers, each one once.

    If a model's `env` sets ``CUDA_VISIBLE_DEVICES``, its servers get devices from that list, even if other models use
    them. Two models share devices if both list them, and two servers of a model if it lists a device twice.
    """

    @functools.cached_property
    def _free(self) -> list[str]:
        """The devices that this process may use, less those that were assigned."""
        # On first use: servers that run on the CPU must not wait for nvidia-smi.
        listed = _listed_in(os.environ)
        return _installed() if listed is None else listed

    def share(self, count: int, servers: int, env: Mapping[str, str], model: str) -> list[dict[str, str]]:
        """Return the environment variables that assign GPUs to a model's servers, one dict for each server.

        Args:
            count: the number of GPUs of each server.
            servers: the number of servers.
            env: the environment variables that the user sets for the model.
            model: the model's name, for messages.

        Raises:
            ConfigError: there are too few free GPUs.
        """
        if not count:
            return [{} for _ in range(servers)]
        listed = _listed_in(env)
        free = self._free if listed is None else listed
        if count * servers > len(free):
            raise ConfigError(
                f"model {model!r}: {servers} server(s) with {count} GPU(s) each need {count * servers}, and "
                f"{len(free)} are free here: lower replicas or tensor_parallel_size. Without nvidia-smi, set "
                f"{VISIBLE_DEVICES} to the devices to use"
            )
        taken = [free.pop(0) for _ in range(count * servers)]
        return [{VISIBLE_DEVICES: ",".join(taken[i * count : (i + 1) * count])} for i in range(servers)]


def _listed_in(environment: Mapping[str, str]) -> list[str] | None:
    listed = environment.get(VISIBLE_DEVICES)
    return None if listed is None else [device.strip() for device in listed.split(",") if device.strip()]


def _installed() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
