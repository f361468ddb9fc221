"""Assigns the GPUs of this machine to servers, and names accelerators in Ray."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_loop.errors import ConfigError

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HIP_VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A type of accelerator: its name in Ray and its environment variable."""

    resource: str = "GPU"
    """The name of the Ray resource."""
    visible: str = CUDA_VISIBLE_DEVICES
    """The environment variable that restricts a process to some of the devices."""

    def options(self, count: float) -> dict[str, Any]:
        """Return the options of a Ray actor or task that uses ``count`` devices."""
        return {"num_gpus": count} if self.resource == "GPU" else {"num_gpus": 0, "resources": {self.resource: count}}

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that must agree. On AMD GPUs, `HIP_VISIBLE_DEVICES` takes precedence, and vLLM does
        not start if the two differ; elsewhere, it has no effect."""
        return (self.visible, HIP_VISIBLE_DEVICES) if self.visible == CUDA_VISIBLE_DEVICES else (self.visible,)

    def environment(self, ids: list[str]) -> dict[str, str]:
        """Return the environment variables of a process that uses the devices with these ids."""
        return dict.fromkeys(self.variables, ",".join(ids))


GPU = Accelerator()
"""GPUs of NVIDIA and AMD."""

NPU = Accelerator("NPU", "ASCEND_RT_VISIBLE_DEVICES")
"""Ascend NPUs."""


VISIBLE_DEVICES = (*GPU.variables, *NPU.variables)
"""The environment variables that name accelerators."""


class GpuShares:
    """Assigns this machine's accelerators to servers, each one once.

    If a model's `env` sets ``CUDA_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES`` or ``ASCEND_RT_VISIBLE_DEVICES``, its
    servers get devices from that list, even if other models use them. Two models share devices if both list them, and
    two servers of a model if it lists a device twice.
    """

    @functools.cached_property
    def _free(self) -> tuple[Accelerator, list[str]]:
        """The devices that this process may use, less those that were assigned."""
        # On first use: servers that run on the CPU must not wait for nvidia-smi.
        return _listed_in(os.environ) or (GPU, _installed())

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
        accelerator, free = _listed_in(env) or self._free
        if count * servers > len(free):
            raise ConfigError(
                f"model {model!r}: {servers} server(s) with {count} GPU(s) each need {count * servers}, and "
                f"{len(free)} are free here: lower replicas or tensor_parallel_size. Without nvidia-smi, set "
                f"{HIP_VISIBLE_DEVICES} (AMD GPUs) or {NPU.visible} to the devices to use"
            )
        taken = [free.pop(0) for _ in range(count * servers)]
        return [accelerator.environment(taken[i * count : (i + 1) * count]) for i in range(servers)]


def _listed_in(environment: Mapping[str, str]) -> tuple[Accelerator, list[str]] | None:
    for accelerator in (GPU, NPU):
        for variable in accelerator.variables:
            if variable in environment:
                return accelerator, [device.strip() for device in environment[variable].split(",") if device.strip()]
    return None


def _installed() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
