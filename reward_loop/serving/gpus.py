"""Assigns the GPUs of this machine to servers, and names accelerators in Ray."""

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
    """A type of accelerator: its name in Ray and its environment variable."""

    resource: str = "GPU"
    """The name of the Ray resource."""
    visible: str = CUDA_VISIBLE_DEVICES
    """The environment variable that restricts a process to some of the devices."""

    def options(self, count: float) -> dict[str, Any]:
        """Returns the options of a Ray actor or task that uses ``count`` devices."""
        return {"num_gpus": count} if self.resource == "GPU" else {"num_gpus": 0, "resources": {self.resource: count}}

    def environment(self, ids: list[str]) -> dict[str, str]:
        """Returns the environment variables of a process that uses the devices with these ids."""
        return {self.visible: ",".join(ids)}


GPU = Accelerator()
"""NVIDIA GPUs."""


class GpuShares:
    """Assigns this machine's GPUs to servers, each GPU once.

    If a model's `env` sets ``CUDA_VISIBLE_DEVICES``, its servers get GPUs from that list, even if other models use
    them. Two models share GPUs if both list them.
    """

    def __init__(self) -> None:
        self._free: list[str] | None = None

    def share(self, count: int, servers: int, env: Mapping[str, str], model: str) -> list[dict[str, str]]:
        """Returns the environment variables that assign GPUs to a model's servers, one dict for each server.

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
