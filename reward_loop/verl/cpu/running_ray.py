"""A run on a CPU that joins a running Ray cluster, such as one of several nodes, instead of starting its own Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from reward_loop.errors import ConfigError

__all__ = ["joins_running_ray", "prepare_to_join"]

_OF_A_NODE = ("num_cpus", "num_gpus", "object_store_memory", "resources")
"""Options of ``ray.init`` that Ray refuses when it joins a cluster."""


def joins_running_ray(address: str | None) -> bool:
    """Returns whether ``ray.init(address)`` joins a running cluster, by the rules in the documentation of ``ray.init``.

    Args:
        address: the option ``ray_kwargs.ray_init.address``.
    """
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address is None:
        return _last_cluster().exists()
    return address != "local"


def _last_cluster() -> Path:
    """Returns the file in which ``ray start`` writes the address of the cluster."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(folder, "ray", "ray_current_cluster")


def prepare_to_join(ray_init: DictConfig, environment: Mapping[str, str]) -> None:
    """Makes the options of ``ray.init`` fit for a running cluster.

    Args:
        ray_init: the option group ``ray_kwargs.ray_init``; changed in place.
        environment: variables for all workers of the run. Without this, workers get those of ``ray start`` only.
            Variables in ``runtime_env.env_vars`` take precedence.

    Raises:
        ConfigError: an option sets resources of a node, which are fixed when the node starts.
    """
    for name in _OF_A_NODE:
        if ray_init.get(name) is not None:
            raise ConfigError(
                f"ray_kwargs.ray_init.{name}={ray_init[name]} has no effect on a running Ray cluster. Leave it out, "
                f"and set it when the node starts: ray start --{name.replace('_', '-')}=...; or start a new Ray with "
                "+ray_kwargs.ray_init.address=local"
            )
    given = OmegaConf.select(ray_init, "runtime_env.env_vars") or {}
    with open_dict(ray_init):
        OmegaConf.update(ray_init, "runtime_env.env_vars", {**environment, **given}, force_add=True)
