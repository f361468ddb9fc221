"""Measures isolated calls: each in a process of its own, beside processes that are used again.

    python -m benchmarks.isolated

The functions import nothing, sympy, Math-Verify, verl and torch. For each: milliseconds of a call, one after another,
and when all are submitted at once, with ``calls_per_process=1`` (each call in a new fork of a process that has loaded
the function) and ``null`` (a process is used again). Then the memory of the process that has loaded the function, and
of 64 forks that wait for their calls: what each has for itself. Functions whose packages are not installed are left
out. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction, load_function
from reward_loop._util.process import children

__all__ = ["SOURCES"]

CALLS = 60
WAITING = 64
USED = "\ncompute_score('1/2')\n"
"""Fills the caches of a module, as its users would at import."""

SOURCES = {
    "plain": "def compute_score(solution_str):\n    return float(solution_str == '1/2')\n",
    "sympy": "import sympy\n"
    "def compute_score(solution_str):\n    return float(sympy.simplify(sympy.sympify(solution_str) - 0.5) == 0)" + USED,
    "math_verify": "from math_verify import parse, verify\n"
    "def compute_score(solution_str):\n    return float(verify(parse('$0.5$'), parse(f'${solution_str}$')))" + USED,
    "verl": "import verl.trainer.ppo.reward\n"
    "def compute_score(solution_str):\n    return float(solution_str == '1/2')\n",
    "torch": "import torch\ndef compute_score(solution_str):\n    return float(torch.ones(16).mean())\n",
}


async def seconds(function: ScoringFunction) -> tuple[float, float]:
    """Return the median seconds of a call one after another, and the seconds of a call of many at once."""
    sample = RewardSample("1/2")
    assert (await function(sample)).score == 1.0  # the process loads the function
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        await function(sample)
        taken.append(time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*(function(sample) for _ in range(4 * CALLS)))
    return median(taken), (time.perf_counter() - began) / (4 * CALLS)


def private_mb(pid: int) -> float:
    """Return the memory (in 2^20 bytes) that a process shares with no other one."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Private_\w+:\s+(\d+)", text, re.MULTILINE)) / 1024


def anonymous_mb(pid: int) -> float:
    """Return the memory (in 2^20 bytes) of a process without that of files."""
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024


async def memory_mb(function: ScoringFunction) -> tuple[float, float]:
    """Return the memory of the template, and of a fork that waits for its call, as the mean of `WAITING` forks."""
    known = set(children(os.getpid()))
    await function(RewardSample("1/2"))
    (template,) = set(children(os.getpid())) - known
    waiting: list[float] = []
    async with asyncio.timeout(120):
        while len(waiting) < WAITING:
            await asyncio.sleep(0.1)
            with contextlib.suppress(OSError):  # the fork that has served the call ends
                waiting = [private_mb(pid) for pid in children(template)]
    return anonymous_mb(template), mean(waiting)


async def measure(path: str) -> dict[str, float]:
    """Measure one function."""
    found: dict[str, float] = {}
    for name, calls in (("fork", 1), ("used", None)):
        options = RewardLoopConfig(isolation="process", max_processes=2, calls_per_process=calls)
        function = ScoringFunction(load_function(path), options=options)
        alone, together = await seconds(function)
        await asyncio.to_thread(function.close)
        found |= {f"{name}_ms": round(alone * 1000, 2), f"{name}_ms_of_many": round(together * 1000, 2)}
    function = ScoringFunction(load_function(path), isolation="process", max_processes=WAITING)
    template_mb, waiting_mb = await memory_mb(function)
    found |= {"template_mb": round(template_mb, 1), "waiting_mb": round(waiting_mb, 2)}
    await asyncio.to_thread(function.close)
    return found


def main() -> None:
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source in SOURCES.items():
            if name != "plain" and importlib.util.find_spec(name) is None:
                continue
            path = Path(folder, f"{name}_scorer.py")
            path.write_text(source)
            results[name] = asyncio.run(measure(str(path)))
    print(
        f"{'':12} {'fork ms':>9} {'used ms':>9} {'fork, many':>11} {'used, many':>11} {'template':>10} {'waiting':>9}"
    )
    for name, one in results.items():
        print(
            f"{name:12} {one['fork_ms']:9.2f} {one['used_ms']:9.2f} {one['fork_ms_of_many']:11.2f} "
            f"{one['used_ms_of_many']:11.2f} {one['template_mb']:7.1f} MB {one['waiting_mb']:6.2f} MB"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
