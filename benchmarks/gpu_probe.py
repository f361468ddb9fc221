"""Tries what a run of verl needs from a GPU, in a process of its own: its memory is free again when it ends.

    python -m benchmarks.gpu_probe (cuda | cpu)

Prints a line of JSON for each check.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PACKAGES = ("verl", "vllm", "ray", "torch", "transformers", "triton", "TransferQueue", "tensordict", "numpy")
SIZE, TIMES = 4096, 20
SHARED_WITHIN_S = 60.0


def machine(device: str) -> str:
    """Return the GPU, its driver, and the cores and the memory of the machine."""
    cores = f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    if device == "cpu":
        return cores
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return f"{gpus.replace(chr(10), '; ')}; {cores}; gcc: {shutil.which('gcc') or 'missing, which Triton needs'}"


def versions(device: str) -> str:
    """Return the versions of the packages that matter."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def multiplication(device: str) -> str:
    """Return the speed of products of large matrices in bfloat16."""
    import torch

    size, times = (SIZE, TIMES) if device == "cuda" else (256, 1)
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    (x @ x)[0, 0].item()  # the first product loads the library
    began = time.perf_counter()
    for _ in range(times):
        y = x @ x
    y[0, 0].item()  # waits for the device
    return f"{2 * size**3 * times / (time.perf_counter() - began) / 1e12:.3g} TFLOP/s"


def kernels(device: str) -> str:
    """Compare a kernel of vLLM with torch."""
    if device == "cpu" and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed, and not needed on the CPU"
    import torch
    from vllm import _custom_ops

    x = torch.randn(64, 896, device=device, dtype=torch.bfloat16)
    weight, found = torch.ones(896, device=device, dtype=torch.bfloat16), torch.empty_like(x)
    _custom_ops.rms_norm(found, x, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(x.float(), (896,), eps=1e-6)
    difference = (found.float() - expected).abs().max().item()
    if difference > 0.05:
        raise ValueError(f"vLLM's rms_norm differs from torch's by {difference:.3f}")
    return f"vLLM's rms_norm differs from torch's by {difference:.4f}"


def sharing(device: str) -> str:
    """Pass a tensor to another process without a copy, as verl passes weights to the rollout."""
    import torch
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    tensors, sums = context.Queue(), context.Queue()
    process = context.Process(target=_add_up, args=(tensors, sums), daemon=True)
    process.start()
    try:
        ones = torch.ones(2**20, device=device)
        tensors.put(ones)
        found = sums.get(timeout=SHARED_WITHIN_S)
    finally:
        process.terminate()
        process.join()
    if found != 2**20:
        raise ValueError(f"the other process read {found} instead of {2**20}")
    return "another process reads a tensor"


def _add_up(tensors: Any, sums: Any) -> None:
    tensor = tensors.get()
    sums.put(tensor.sum().item())


CHECKS: dict[str, Callable[[str], str]] = {
    "machine": machine,
    "versions": versions,
    "multiplication": multiplication,
    "kernels": kernels,
    "sharing": sharing,
}


def main() -> int:
    """Make all checks. Returns 1 if one failed."""
    device = sys.argv[1]
    failed = False
    for name, check in CHECKS.items():
        began = time.perf_counter()
        try:
            line: dict[str, Any] = {"check": name, "found": check(device)}
        except Exception as error:  # the checks are of unknown machines
            line = {"check": name, "error": f"{type(error).__name__}: {error}"}
            failed = True
        print(json.dumps({**line, "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
