"""Assigns the GPUs of this machine to servers."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping

from reward_loop.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The environment variable that restricts a process to some GPUs."""


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
