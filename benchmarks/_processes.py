"""How well worker processes use the cores: a checker that computes for 20 ms, in as many processes as there are cores.

    python -m benchmarks._processes

The ideal is what the machine gives in the same minute: as many such calls in plain loops, one process a core, each told
once how many to make. The efficiency is the ideal's time over that of a `ScoringFunction` with ``isolation="process"``,
which sends every sample to a process and its score back. Both are timed warm, in turn, and the best of each counts: a
busy machine only adds time.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

from reward_loop import RewardSample, ScoringFunction
from reward_loop.processes.pool import usable_cores

__all__ = ["measure_process_efficiency"]

CALL_SECONDS = 0.02


def checker(extra_info: dict[str, int]) -> float:
    """Count up to ``steps``: work that holds the interpreter's lock."""
    left = extra_info["steps"]
    while left:
        left -= 1
    return 1.0


def check_many(calls: int, steps: int) -> float:
    """Call it so often, in a plain loop; the CPU seconds of the quickest call."""
    taken = []
    for _ in range(calls):
        began = time.process_time()
        checker({"steps": steps})
        taken.append(time.process_time() - began)
    return min(taken)


async def score_all(function: ScoringFunction, calls: int, steps: int) -> float:
    """The seconds that so many samples take, all submitted at once."""
    began = time.perf_counter()
    samples = [RewardSample("", extra_info={"steps": steps}) for _ in range(calls)]
    results = await asyncio.gather(*(function(sample) for sample in samples))
    assert all(result.score == 1.0 for result in results)
    return time.perf_counter() - began


def measure_process_efficiency(quick: bool = False) -> dict[str, float]:
    """Measure, in about 25 seconds, or 8 with ``quick``.

    Returns:
        ``process_efficiency`` (ideal seconds over ours), ``process_samples_per_s`` and ``process_cores``.
    """
    cores = usable_cores()
    per_core, rounds = (40, 3) if quick else (100, 5)
    steps = int(1e6 * CALL_SECONDS / check_many(5, 1_000_000))
    function = ScoringFunction(checker, isolation="process", max_processes=cores)
    ideal, ours = [], []
    # In sessions of their own, like workers: on a busy machine, the kernel shares cores among sessions.
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), initializer=os.setsid) as pool:
        for calls in (1, *[per_core] * rounds):
            began = time.perf_counter()
            list(pool.map(check_many, [calls] * cores, [steps] * cores))
            ideal.append(time.perf_counter() - began)
            ours.append(asyncio.run(score_all(function, calls * cores, steps)))
    function.close()
    ideal_s, ours_s = min(ideal[1:]), min(ours[1:])  # the first round starts the processes
    return {
        "process_efficiency": round(ideal_s / ours_s, 4),
        "process_samples_per_s": round(per_core * cores / ours_s, 1),
        "process_cores": cores,
    }


if __name__ == "__main__":
    print(json.dumps(measure_process_efficiency()))
