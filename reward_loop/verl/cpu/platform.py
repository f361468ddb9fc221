"""A verl platform for the CPU."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

__all__ = ["CPUPlatform"]


def _device_module() -> ModuleType:
    """Returns ``torch.cpu`` with the functions that verl expects of ``torch.<device>``.

    Memory counters are zero, since there is no device memory. The random state is that of torch's default generator,
    which checkpoints save and restore.
    """
    module = types.ModuleType("reward_loop.verl.cpu.device")
    module.__dict__.update(vars(torch.cpu))

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for counter in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(module, counter, zero)
    for action in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_device"):
        setattr(module, action, nothing)
    module.is_available = lambda: False  # type: ignore[attr-defined]
    module.current_device = lambda: "cpu"  # type: ignore[attr-defined]
    module.get_device_name = lambda *args: "CPU"  # type: ignore[attr-defined]
    module.mem_get_info = lambda *args: (0, 0)  # type: ignore[attr-defined]
    module.get_rng_state = lambda *args: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)  # type: ignore[attr-defined]
    module.manual_seed = torch.manual_seed  # type: ignore[attr-defined]
    module.manual_seed_all = torch.manual_seed  # type: ignore[attr-defined]
    return module


class CPUPlatform(PlatformBase):
    """Runs verl's workers on the CPU, connected by gloo. Used only with ``VERL_PLATFORM=cpu``, never by default."""

    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

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

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> Any:
        return None
