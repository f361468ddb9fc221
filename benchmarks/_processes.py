"""How well worker processes use the cores: a checker that computes for 20 ms, in as many processes as there are cores.

    python -m benchmarks._processes

The ideal is the work divided by the cores: the CPU time of the same calls in plain loops, one process a core, all at a
time, so that cores that share caches and clocks count as what they are. The efficiency is the ideal over the time that
a `ScoringFunction` with ``isolation="process"`` takes, which sends every sample to a process and its score back. It is
timed warm, several times, and the best counts: a busy machine only adds time.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

from reward_loop import RewardSample, ScoringFunction
from reward_loop.scoring.processes import usable_cores

__all__ = ["measure_process_efficiency"]

CALL_SECONDS = 0.02


def checker(extra_info: dict[str, int]) -> float:
    """Count up to ``steps``: work that holds the interpreter's lock."""
    left = extra_info["steps"]
    while left:
        left -= 1
    return 1.0


def check_many(calls: int, steps: int) -> float:
    """Call it so often, in a plain loop; the CPU seconds of a call, the best of them."""
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
    """Measure, in about 15 seconds, or 5 with ``quick``, on a quiet machine.

    Returns:
        ``process_efficiency`` (the ideal over our seconds), ``process_samples_per_s`` and ``process_cores``.
    """
    cores = usable_cores()
    per_core, rounds = (50, 3) if quick else (100, 6)
    steps = int(1e6 * CALL_SECONDS / check_many(5, 1_000_000))
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        work = sum(pool.map(check_many, [per_core] * cores, [steps] * cores)) * per_core
    function = ScoringFunction(checker, isolation="process", max_processes=cores)
    asyncio.run(score_all(function, cores, steps))  # starts the processes
    seconds = min(asyncio.run(score_all(function, per_core * cores, steps)) for _ in range(rounds))
    function.close()
    return {
        "process_efficiency": round(work / cores / seconds, 4),
        "process_samples_per_s": round(per_core * cores / seconds, 1),
        "process_cores": cores,
    }


if __name__ == "__main__":
    print(json.dumps(measure_process_efficiency()))
