"""Which GPUs of this machine a server gets, and what Ray calls accelerators."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_loop.errors import ConfigError

__all__ = ["CUDA_VISIBLE_DEVICES", "GPU", "Accelerator", "GpuShares"]

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What Ray and the servers call the devices that models run on."""

    resource: str = "GPU"
    """Ray's name for them."""
    visible: str = CUDA_VISIBLE_DEVICES
    """The environment variable that restricts a process to some of them."""

    def options(self, count: float) -> dict[str, Any]:
        """The options of a Ray actor or task that takes some of them."""
        return {"num_gpus": count} if self.resource == "GPU" else {"num_gpus": 0, "resources": {self.resource: count}}

    def environment(self, ids: list[str]) -> dict[str, str]:
        """The environment of a process that uses the devices with these ids."""
        return {self.visible: ",".join(ids)}


GPU = Accelerator()
"""Ray's name and variable for NVIDIA's devices."""


class GpuShares:
    """Deals this machine's GPUs out to servers, each GPU once.

    A model that names ``CUDA_VISIBLE_DEVICES`` in its `env` gets its servers' GPUs from that list, whatever other
    models use; so two models share GPUs if both name them.
    """

    def __init__(self) -> None:
        self._free: list[str] | None = None

    def share(self, count: int, servers: int, env: Mapping[str, str], model: str) -> list[dict[str, str]]:
        """The environment variables of each of a model's servers.

        Args:
            count: GPUs of each server.
            servers: how many servers there are.
            env: what the user sets for them.
            model: its name, for messages.

        Raises:
            ConfigError: there are too few GPUs.
        """
        if not count:
            return [{} for _ in range(servers)]
        if CUDA_VISIBLE_DEVICES in env:
            free = _listed(env[CUDA_VISIBLE_DEVICES])
        else:
            if self._free is None:
                self._free = _visible()
            free = self._free
        if count * servers > len(free):
            raise ConfigError(
                f"model {model!r}: {servers} server(s) with {count} GPU(s) each need {count * servers}, and "
                f"{len(free)} are free here: lower replicas or tensor_parallel_size"
            )
        taken = [free.pop(0) for _ in range(count * servers)]
        return [{CUDA_VISIBLE_DEVICES: ",".join(taken[i * count : (i + 1) * count])} for i in range(servers)]


def _visible() -> list[str]:
    if CUDA_VISIBLE_DEVICES in os.environ:
        return _listed(os.environ[CUDA_VISIBLE_DEVICES])
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _listed(devices: str) -> list[str]:
    return [device.strip() for device in devices.split(",") if device.strip()]
