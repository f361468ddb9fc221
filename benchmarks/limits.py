"""Measures what a permit costs: in one process, and by the job's actor.

    python -m benchmarks.limits [--quick]

- In one process: permits per second of the limits that a run without Ray has.
- By the actor, workers are Ray actors, which request permits and release them at once. The limit is never reached.
  *Serial*: one worker has one request at a time; the time is that from the request to the permit. *Concurrent*: each of
  4 workers keeps 64 requests in flight, and requests of one turn of its event loop go in one call. *Leased*: the same,
  with 1,024 requests for each worker, so that a call of the actor grants many permits.
- Waiting: 20,000 samples of the workers wait for 64 permits; the time until all have had theirs.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from typing import Any

from reward_loop import RewardLoopConfig
from reward_loop.limits import Limits, LocalLimits

WORKERS = 4
WAYS = {"serial": (1, 1), "concurrent": (WORKERS, 64), "leased": (WORKERS, 1024)}
"""Each way's workers, and the requests that each of them keeps in flight."""
WAITING = 20_000
PLACES = 64

OPTIONS = RewardLoopConfig.model_validate(
    {"limits": {"judge": {"max_concurrent": 1_000_000}, "places": {"max_concurrent": PLACES}}}
)


async def saturate(limits: Limits, seconds: float, in_flight: int) -> list[float]:
    """Keep requests for permits in flight for some seconds; return the seconds that each permit took."""
    until, took = time.perf_counter() + seconds, []

    async def ask() -> None:
        while (began := time.perf_counter()) < until:
            permit = await limits.acquire("judge")
            took.append(time.perf_counter() - began)
            permit.leave()
            await asyncio.sleep(0)

    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return took


class Worker:
    """A reward worker that only requests permits. A Ray actor."""

    def __init__(self, handle: Any, name: str) -> None:
        from reward_loop.verl.run.job import JobLimits

        self._limits = JobLimits(handle, name, OPTIONS)

    async def saturate(self, seconds: float, in_flight: int) -> list[float]:
        """See `saturate`."""
        return await saturate(self._limits, seconds, in_flight)

    async def wait(self, samples: int) -> None:
        """Have samples wait for permits at the same time, and hold each for a turn of the event loop."""

        async def sample(age: int) -> None:
            permit = await self._limits.acquire("places", order=(1.0, float(age)))
            await asyncio.sleep(0)
            permit.leave()

        await asyncio.gather(*map(sample, range(samples)))


def by_the_actor(seconds: float) -> dict[str, dict[str, float]]:
    """Measure each way, and then samples that wait."""
    import ray

    from reward_loop.verl.run.job import RunningJob

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        job = RunningJob(OPTIONS, 60.0)
        actor = ray.remote(Worker).options(num_cpus=0, max_concurrency=1000)
        workers = [actor.remote(job.handle, f"worker {number}") for number in range(WORKERS)]
        ray.get([worker.saturate.remote(0.5, 1) for worker in workers])
        found = {}
        for way, (count, in_flight) in WAYS.items():
            answers = ray.get([worker.saturate.remote(seconds, in_flight) for worker in workers[:count]])
            found[way] = figures(list(itertools.chain(*answers)), seconds)
        began = time.perf_counter()
        ray.get([worker.wait.remote(WAITING // WORKERS) for worker in workers])
        found["waiting"] = {"samples": WAITING, "seconds": round(time.perf_counter() - began, 1)}
        return found
    finally:
        ray.shutdown()


def figures(took: list[float], seconds: float) -> dict[str, float]:
    """Return permits per second, and the median and the 99th percentile of the time of a permit in milliseconds."""
    took.sort()
    p50, p99 = (round(1000 * took[int(len(took) * share)], 2) for share in (0.5, 0.99))
    return {"permits_per_s": round(len(took) / seconds), "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter measurements, under 50 s")
    seconds = 3.0 if parser.parse_args().quick else 15.0
    found = {"one process": figures(asyncio.run(saturate(LocalLimits(OPTIONS), seconds, 64)), seconds)}
    found |= by_the_actor(seconds)
    print(f"{'a permit':24}{'permits/s':>11}{'p50 ms':>9}{'p99 ms':>9}")
    for way, row in found.items():
        if way != "waiting":
            print(f"{way:24}{row['permits_per_s']:>11,}{row['p50_ms']:>9}{row['p99_ms']:>9}")
    print(f"{WAITING:,} samples wait for {PLACES} permits: {found['waiting']['seconds']} s")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
