"""How well worker processes use the cores: a checker that computes for 20 ms, in as many processes as there are cores.

It compares texts, as rewards for similarity do, so that its time is made of many kinds of work. A loop that only counts
differed by 10 % from process to process, workers or not, perhaps by where in memory its numbers happened to lie.

    python -m benchmarks._processes

The ideal is what the machine gives at the same time: as many such calls in plain loops, one process a core, each told
once how many to make. The efficiency is the ideal's time over that of a `ScoringFunction` with ``isolation="process"``,
which sends every sample to a process and its score back. Both are timed warm, in turn, in rounds of half a second; each
of ours is compared with the ideal just before and just after it, and the median of these ratios counts. A machine that
is shared changes its speed by half within seconds: the best of either may come from different moments.
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
from reward_loop._util.parent_death_pipe import follow
from reward_loop.processes.pool import usable_cores

__all__ = ["measure_process_efficiency"]

CALL_SECONDS = 0.02
RESPONSE = "In April she sold 48 clips, and in May half as many: 48 / 2 = 24. That makes 48 + 24 = 72. #### 72\n" * 3
REFERENCE = "Natalia sold 48/2 = 24 clips in May. She sold 48+24 = 72 clips altogether in April and May. #### 72\n" * 3


def checker(extra_info: dict[str, int]) -> float:
    """How alike two texts are, found so many times."""
    for _ in range(extra_info["times"]):
        alike = difflib.SequenceMatcher(None, RESPONSE, REFERENCE, autojunk=False).ratio()
    return alike


def check_many(calls: int, times: int) -> float:
    """Call it so often, in a plain loop; the CPU seconds of the quickest call."""
    taken = []
    for _ in range(calls):
        began = time.process_time()
        checker({"times": times})
        taken.append(time.process_time() - began)
    return min(taken)


def _begin() -> None:
    """In a process of the ideal: in a session of its own, like workers, as a busy kernel shares cores among sessions;
    and gone when the benchmark is."""
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    follow(parent.sentinel)


async def score_all(function: ScoringFunction, calls: int, times: int) -> float:
    """The seconds that so many samples take, all submitted at once."""
    began = time.perf_counter()
    samples = [RewardSample("", extra_info={"times": times}) for _ in range(calls)]
    results = await asyncio.gather(*(function(sample) for sample in samples))
    assert all(0 < result.score < 1 for result in results)
    return time.perf_counter() - began


def measure_process_efficiency(quick: bool = False) -> dict[str, float]:
    """Measure, in about 25 seconds, or 8 with ``quick``.

    Returns:
        ``process_efficiency`` (ideal seconds over ours), ``process_samples_per_s`` and ``process_cores``.
    """
    cores = usable_cores()
    per_core, rounds = 20, 8 if quick else 25
    times = max(1, round(CALL_SECONDS / check_many(20, 1)))
    function = ScoringFunction(checker, isolation="process", max_processes=cores)
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

        ideal_s(1), ours_s(1)  # starts the processes
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
