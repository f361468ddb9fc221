"""Prepares a run on a CPU: its environment variables, and the options of its own Ray or of a running cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.serving.models import served_models
from reward_loop.verl.cpu.preload import preloaded

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "reward_loop.verl.cpu.plugin",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default timeout is 30 s, which can be too short on a busy laptop.
    "RAY_agent_register_timeout_ms": "300000",
    # By default, Ray starts one worker for each core at once. A run never uses them: they lack its `runtime_env`.
    "RAY_prestart_worker_first_driver": "0",
    # By default, Ray runs workers at nice 15, so all other processes of the machine have priority.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
"""Environment variables for a run on a CPU. Values that the user has set take precedence."""

OBJECT_STORE_BYTES = 256 * 2**20
"""The size of Ray's object store in a run on a CPU."""

_OF_A_NODE = ("num_cpus", "num_gpus", "object_store_memory", "resources")
"""Options of ``ray.init`` that Ray refuses when it joins a cluster."""


def run_environment(config: DictConfig) -> dict[str, str]:
    """Return `CPU_ENVIRONMENT` with the values that the user has set.

    Without the loopback interface, if ranks on several nodes must reach each other.
    """
    environment = CPU_ENVIRONMENT | {name: os.environ[name] for name in CPU_ENVIRONMENT if name in os.environ}
    if config.trainer.nnodes > 1 and _joins_running_ray(config) and "GLOO_SOCKET_IFNAME" not in os.environ:
        del environment["GLOO_SOCKET_IFNAME"]
    return environment


@contextmanager
def prepared(config: DictConfig, model: RewardModelConfig | None) -> Iterator[None]:
    """Set the options of a run that the user has not set, in place. The run must be inside the block.

    A Ray that the run starts forks its workers from a process with preloaded modules. This has no effect outside Linux,
    or if the user has set ``py_executable``.

    Args:
        config: verl's whole configuration.
        model: the servers of the reward model, if there is one.

    Raises:
        ConfigError: an option does not work on a CPU, or on a running cluster.
    """
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes + _stand_alone_ranks(config)
    ray_init = config.ray_kwargs.ray_init
    if _joins_running_ray(config):
        _prepare_to_join(ray_init, run_environment(config))
        yield
        return
    # Logical GPUs and CPUs of Ray: verl's actors request them, and verl waits silently if there are too few.
    if ray_init.num_gpus is None:
        ray_init.num_gpus = ranks
    if ray_init.num_cpus is None:
        ray_init.num_cpus = 8 + 4 * ranks + config.reward.num_workers + _cpus_of_servers(model)
    if ray_init.object_store_memory is None:
        ray_init.object_store_memory = OBJECT_STORE_BYTES
    if sys.platform != "linux" or OmegaConf.select(ray_init, "runtime_env.py_executable"):
        yield
        return
    with preloaded() as executable:
        with open_dict(ray_init):
            OmegaConf.update(ray_init, "runtime_env.py_executable", executable)
        yield


def _stand_alone_ranks(config: DictConfig) -> int:
    """Return the number of rollouts apart from the trainer's ranks. Chooses how they get the weights."""
    if config.trainer.v1.trainer_mode != "separate_async":
        return 0
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
    if config.trainer.v1.separate_async.parameter_sync_step > 1 and not bypass:
        # verl saves the old policy with `.cpu()`, which makes no copy on a CPU: it would change with the new one.
        raise ConfigError(
            "trainer.v1.separate_async.parameter_sync_step > 1 gives wrong old log-probabilities on a CPU: set it "
            "to 1, or algorithm.rollout_correction.bypass_mode=True"
        )
    rollout = config.actor_rollout_ref.rollout
    if rollout.checkpoint_engine.backend == "naive":
        rollout.checkpoint_engine.backend = "ray"
        rollout.checkpoint_engine.custom_backend_module = "reward_loop.verl.cpu.checkpoint"
    return int(rollout.n_gpus_per_node * rollout.nnodes)


def _cpus_of_servers(model: RewardModelConfig | None) -> int:
    if model is None or all(one.placement != "ray" for one in (model, *model.models.values())):
        return 0
    return sum(one.replicas * one.threads for one in served_models(model) if one.placement == "ray")


def _joins_running_ray(config: DictConfig) -> bool:
    """Return whether ``ray.init`` joins a running cluster, by the rules in its documentation."""
    address = config.ray_kwargs.ray_init.get("address")
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or address
    if address is None:
        # `ray start` writes the address of the cluster to this file.
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        return Path(folder, "ray", "ray_current_cluster").exists()
    return address != "local"


def _prepare_to_join(ray_init: DictConfig, environment: Mapping[str, str]) -> None:
    """Make the options of ``ray.init`` fit for a running cluster, whose workers have the environment of ``ray start``.

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
