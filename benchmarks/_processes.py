"""Measures how well worker processes use the cores: a function that computes for 20 ms, in one process per core.

    python -m benchmarks._processes

The function compares texts, like a similarity reward. A plain counting loop is not used: its time differed by 10 %
between processes, with and without workers.

- Ideal: plain loops that make the same number of calls, in one process per core.
- Ours: a `ScoringFunction` with ``isolation="process"``, which sends each sample to a process and receives its score.
  The processes serve many calls: `benchmarks.isolated` measures what a fork for each call costs.
- Efficiency: ideal time / our time.

The processes are started before the measurement. Ideal and ours alternate in rounds of half a second. Each round of
ours is compared with the ideal rounds just before and just after it, and the median of the ratios is reported. The
minima of both would not be comparable: the speed of a shared machine changes by up to 50 % within seconds.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from reward_loop import RewardSample, ScoringFunction
from reward_loop._util.process import exit_with_parent
from reward_loop.processes.pool import usable_cores

__all__ = ["measure_process_efficiency"]

CALL_SECONDS = 0.02
RESPONSE = "In April she sold 48 clips, and in May half as many: 48 / 2 = 24. That makes 48 + 24 = 72. #### 72\n" * 3
REFERENCE = "Natalia sold 48/2 = 24 clips in May. She sold 48+24 = 72 clips altogether in April and May. #### 72\n" * 3


def checker(extra_info: dict[str, int]) -> float:
    """Return the similarity of two texts, computed ``extra_info["times"]`` times."""
    for _ in range(extra_info["times"]):
        alike = difflib.SequenceMatcher(None, RESPONSE, REFERENCE, autojunk=False).ratio()
    return alike


def check_many(calls: int, times: int) -> float:
    """Call `checker` ``calls`` times in a loop, and return the CPU seconds of the fastest call."""
    taken = []
    for _ in range(calls):
        began = time.process_time()
        checker({"times": times})
        taken.append(time.process_time() - began)
    return min(taken)


def _begin() -> None:
    """Initialize a process of the ideal measurement.

    It gets its own session, like worker processes, because a busy kernel shares the cores among sessions. It exits
    when the benchmark exits.
    """
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    exit_with_parent(parent.sentinel)


async def score_all(function: ScoringFunction, calls: int, times: int) -> float:
    """Submit ``calls`` samples at once, and return the seconds until all are scored."""
    began = time.perf_counter()
    samples = [RewardSample("", extra_info={"times": times}) for _ in range(calls)]
    results = await asyncio.gather(*(function(sample) for sample in samples))
    assert all(0 < result.score < 1 for result in results)
    return time.perf_counter() - began


def measure_process_efficiency(quick: bool = False) -> dict[str, float]:
    """Measure the efficiency of worker processes. Takes about 25 s, or 8 s with ``quick``.

    Returns:
        ``process_efficiency`` (ideal seconds over ours), ``process_samples_per_s`` and ``process_cores``.
    """
    cores = usable_cores()
    per_core, rounds = 20, 8 if quick else 25
    times = max(1, round(CALL_SECONDS / check_many(20, 1)))
    function = ScoringFunction(checker, isolation="process", max_processes=cores, calls_per_process=None)
    with (
        asyncio.Runner() as runner,
        ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), initializer=_begin) as pool,
    ):

        def ideal_s(calls: int) -> float:
            began = time.perf_counter()
            list(pool.map(check_many, [calls] * cores, [times] * cores))
            return time.perf_counter() - began

        def ours_s(calls: int) -> float:
            return runner.run(score_all(function, calls * cores, times))

        ideal_s(1), ours_s(1)  # starts the processes of both
        ideal, ours = [ideal_s(per_core)], []
        for _ in range(rounds):
            ours.append(ours_s(per_core))
            ideal.append(ideal_s(per_core))
    function.close()
    ratios = [(before + after) / 2 / mine for before, mine, after in zip(ideal, ours, ideal[1:], strict=False)]
    return {
        "process_efficiency": round(median(ratios), 4),
        "process_samples_per_s": round(per_core * cores / median(ours), 1),
        "process_cores": cores,
    }


if __name__ == "__main__":
    print(json.dumps(measure_process_efficiency()))
