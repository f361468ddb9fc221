"""Registers the CPU platform, rollout and engines. verl imports it in every process of a CPU run.

The environment variable ``VERL_USE_EXTERNAL_MODULES`` names this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ROLLOUT_NAME = "transformers"
"""``actor_rollout_ref.rollout.name`` of the CPU rollout."""


def _register_rollout() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    def load() -> type[RolloutReplica]:
        from examples.verl_cpu.rollout import CPUReplica

        return CPUReplica

    RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
    # verl has no register function for this table.
    base._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "examples.verl_cpu.rollout.ServerAdapter"


def _prepare_training_worker() -> None:
    import torch.distributed

    from examples.verl_cpu.server import TRANSFER_TIMEOUT_S

    # verl would request "cpu:gloo,cpu:gloo", which torch rejects. It keeps an existing process group.
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend="cpu:gloo",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=os.environ.get("DIST_INIT_METHOD") or _meeting_place(),
            # Not gloo's 30 minutes: the error names the collective in which a rank is missing.
            timeout=timedelta(seconds=TRANSFER_TIMEOUT_S),
        )
    import examples.verl_cpu.engine  # noqa: F401  registers the engines


def _meeting_place() -> str:
    """Return the URL through which the ranks of this worker group find each other.

    On one node, this is a file. A port is less safe, since another program may have taken MASTER_PORT since verl chose
    it; but ranks on several nodes have no common file.
    """
    if int(os.environ["WORLD_SIZE"]) > int(os.environ["RAY_LOCAL_WORLD_SIZE"]):
        return "env://"
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    return f"file://{session}/reward-loop-{os.environ['WG_PREFIX']}-{os.environ['MASTER_PORT']}"


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _device_module() -> ModuleType:
    """Return ``torch.cpu`` with the functions that verl expects of ``torch.<device>``.

    Memory counters are zero, since there is no device memory. The random state is that of torch's default generator,
    which checkpoints save and restore.
    """
    # A module of its own, because torch's must stay as it is.
    module = ModuleType("examples.verl_cpu.device")
    counters = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    actions = ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_device")
    vars(module).update(vars(torch.cpu))
    vars(module).update(dict.fromkeys(counters, _zero) | dict.fromkeys(actions, _nothing))
    vars(module).update(
        is_available=lambda: False,
        current_device=lambda: "cpu",
        get_device_name=lambda *args: "CPU",
        mem_get_info=lambda *args: (0, 0),
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=lambda state, *args: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    return module


class CPUPlatform(PlatformBase):
    """Runs verl's workers on the CPU, connected by gloo. Used only with ``VERL_PLATFORM=cpu``, never by default."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()

    # A CPU has neither device memory nor streams.
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return (None, None)

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # verl's resource pools count only GPUs and NPUs; Ray accepts any ``num_gpus`` without checking the hardware.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


PlatformRegistry.register(platform="cpu")(CPUPlatform)
_register_rollout()
if os.environ.get("WG_BACKEND") == "ray":  # verl sets it only in training workers
    _prepare_training_worker()
