"""Measures the bookkeeping of samples in flight in the trainer's process, with a stub trainer. Part of ``scale.py``.

- Agent: a stub trainer submits groups to a `RewardAgent` at the rate of 64 nodes, while 1,000 to 20,000 samples are
  with the judge, which only sleeps. The figures are CPU time per sample and the delay of a timer on the event loop.
- Tags: reading the tags of all samples from TransferQueue, as verl's replay buffer does in every poll.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardSample

__all__ = ["measure"]

IN_FLIGHT = (1000, 5000, 20_000)
RATE = 1024
"""Samples per second: 64 nodes that generate 16 samples per second each."""
GROUP = 8
SUBMITTED_TOGETHER = 128
TICK_S = 0.01


async def agent_at_rate(in_flight: int, seconds: float) -> dict[str, float]:
    """Submit `RATE` samples per second for ``seconds`` while ``in_flight`` samples are judged."""

    async def compute_score(extra_info: dict[str, float]) -> float:
        await asyncio.sleep(extra_info["judge_s"])
        return 1.0

    judge_s, start_s = in_flight / RATE, in_flight / 5000
    scored = 0

    async def take(pending: Any) -> None:
        nonlocal scored
        async for group in pending:
            scored += len(group.rewards)

    def samples(times: list[float]) -> list[RewardSample]:
        return [RewardSample(f"answer {i}", "math", "42", {"judge_s": at}) for i, at in enumerate(times)]

    async with RewardAgent(NaiveRewardLoopManager(compute_score=compute_score)) as agent, asyncio.TaskGroup() as tasks:
        # The first samples end evenly over the time in which the stub trainer submits the next ones.
        first = [start_s + judge_s * (i + 1) / in_flight for i in range(in_flight)]
        takers = [tasks.create_task(take(agent.submit(samples(first), group_size=GROUP)))]
        await asyncio.sleep(start_s)
        began, cpu, before, delays, submitted = time.perf_counter(), time.process_time(), scored, [], 0
        while (now := time.perf_counter() - began) < seconds:
            while submitted < now * RATE:
                batch = agent.submit(samples([judge_s] * SUBMITTED_TOGETHER), group_size=GROUP)
                takers.append(tasks.create_task(take(batch)))
                submitted += SUBMITTED_TOGETHER
            asked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            delays.append(time.perf_counter() - asked - TICK_S)
        cpu, done = time.process_time() - cpu, scored - before
        most = agent.running
        for taker in takers:
            taker.cancel()
    delays.sort()
    return {
        "cpu_us": round(1e6 * cpu / done, 1),
        "scored_per_s": round(done / seconds),
        "in_flight": most,
        "delay_p99_ms": round(1000 * delays[int(len(delays) * 0.99)], 1),
    }


def tags(in_flight: int) -> dict[str, float]:
    """Read the tags of ``in_flight`` samples and of their prompts, and return the best of five times. Needs Ray."""
    import transfer_queue as tq

    from reward_loop.verl.tq_rows import read_tags

    uids = [f"prompt-{i}" for i in range(in_flight // GROUP)]
    keys = [f"{uid}_{i}_0" for uid in uids for i in range(GROUP)]
    prompt = {"is_prompt": True, "status": "running", "global_steps": 7}
    trajectory = {"status": "success", "prompt_len": 500, "response_len": 2000, "seq_len": 2500, "global_steps": 7}
    tq.kv_batch_put(keys=uids, partition_id="train", tags=[prompt] * len(uids))
    tq.kv_batch_put(keys=keys, partition_id="train", tags=[trajectory] * len(keys))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert len(read_tags()[1]) == len(keys)
        times.append(time.perf_counter() - began)
    tq.kv_clear(keys=[*uids, *keys], partition_id="train")
    return {"ms": round(1000 * min(times), 1)}


def measure(quick: bool) -> dict[str, Any]:
    """Run all measurements, print them, and return the figures by name and number of samples in flight. Needs Ray."""
    import transfer_queue as tq

    seconds, levels = (3.0, IN_FLIGHT[:2]) if quick else (10.0, IN_FLIGHT)
    result: dict[str, Any] = {"agent": {}, "tags": {}}
    tq.init()
    try:
        for in_flight in levels:
            command = [sys.executable, "-m", "benchmarks._scale_trainer", str(in_flight), str(seconds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result["agent"][in_flight] = json.loads(done.stdout)
            result["tags"][in_flight] = tags(in_flight)
    finally:
        tq.close()
    print(f"{'samples in flight':46}" + "".join(f"{in_flight:>11,}" for in_flight in levels))
    for name, figures in result.items():
        for figure in next(iter(figures.values())):
            print(f"{name + ', ' + figure:46}" + "".join(f"{figures[n][figure]:>11,}" for n in levels))
    return result


if __name__ == "__main__":
    print(json.dumps(asyncio.run(agent_at_rate(int(sys.argv[1]), float(sys.argv[2])))))
