"""Measures the bookkeeping of samples in flight in the trainer's process, with a stub trainer. Part of ``scale.py``.

- Agent: a stub trainer submits groups to a `RewardAgent` at the rate of 64 nodes, while 1,000 to 20,000 samples are
  with the judge, which only sleeps. The figures are CPU time per sample and the delay of a timer on the event loop.
- Events: stub agent loop workers, as Ray actors, report samples at the same rate; a real `Listener` receives the
  events, and checks after each one how many mini-batches are ready, as in the mode ``reward_pipeline``.
- Tags: reading the tags of all samples from TransferQueue, as verl's replay buffer does in every poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardSample
from reward_loop.verl.progress import Event

__all__ = ["measure"]

IN_FLIGHT = (1000, 5000, 20_000)
RATE = 1024
"""Samples per second: 64 nodes that generate 16 samples per second each."""
GROUP = 8
SUBMITTED_TOGETHER = 128
EVENT_WORKERS = 4
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


class EventWorker:
    """A stub of an agent loop worker: reports the events of samples that are judged for ``judge_s`` seconds."""

    def __init__(self, prompts: list[str], judge_s: float) -> None:
        self._prompts = prompts
        self._judge_s = judge_s
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        self._run: asyncio.Task[None] | None = None

    async def next_events(self) -> list[Event]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30.0):
                await self._has_events.wait()
        self._has_events.clear()
        events, self._events = self._events, []
        return events

    async def start(self) -> None:
        """Report that all samples are being judged, and then, evenly over time, the end of each."""
        for prompt in self._prompts:
            self._emit(*[("judging", f"{prompt}_{i}") for i in range(GROUP)], ("generated", prompt))
        self._run = asyncio.create_task(self._report())

    async def _report(self) -> None:
        pause, began, ended = self._judge_s / (len(self._prompts) * GROUP), time.perf_counter(), 0
        for prompt in self._prompts:
            for i in range(GROUP):
                ended += 1
                await asyncio.sleep(max(0.0, began + ended * pause - time.perf_counter()))
                self._emit(("judged", f"{prompt}_{i}"))
            self._emit(("published", prompt), ("over", prompt))

    def _emit(self, *events: Event) -> None:
        self._events += events
        self._has_events.set()


def events_at_rate(in_flight: int, seconds: float) -> dict[str, float]:
    """Receive the events of `RATE` samples per second for ``seconds``, of ``in_flight`` samples. Needs Ray."""
    import ray
    from transfer_queue import KVBatchMeta

    from reward_loop.verl.progress import Progress
    from reward_loop.verl.step_batch import StepBatch
    from reward_loop.verl.worker_events import Listener

    uids = [f"prompt-{i}" for i in range(in_flight // GROUP)]
    keys = [f"{uid}_{i}_0" for uid in uids for i in range(GROUP)]
    whole = KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys])
    batch = StepBatch.of(uids, whole, in_order=False)
    progress = Progress()
    progress.submit(uids)
    actor = ray.remote(EventWorker).options(num_cpus=0)
    shares = [uids[i::EVENT_WORKERS] for i in range(EVENT_WORKERS)]
    workers = [actor.remote(share, in_flight / RATE) for share in shares]
    checks = 0

    def ready() -> bool:
        nonlocal checks
        checks += 1
        batch.ready_mini_batches(progress.unfinished, 4, len(uids) // 4)
        return time.perf_counter() > until

    until = float("inf")
    listening = Listener(
        workers,
        progress,
        recover=lambda dead: (),
        resync=lambda: None,
        poll=lambda: None,
        stall_timeout_s=None,
        stall_option="",
    )
    with listening as listener:
        ray.get([worker.start.remote() for worker in workers])
        listener.wait("rollouts", lambda: not progress.generating)
        until = time.perf_counter() + seconds
        cpu, left = time.process_time(), progress.pending
        listener.wait("rewards", ready)
        cpu, left = time.process_time() - cpu, left - progress.pending
    for worker in workers:
        ray.kill(worker)
    return {"cpu_us": round(1e6 * cpu / left, 1), "rewards_per_s": round(left / seconds), "checks": checks}


def tags(in_flight: int) -> dict[str, float]:
    """Read the tags of ``in_flight`` samples and of their prompts, and return the best of five times. Needs Ray."""
    import transfer_queue as tq

    from reward_loop.verl.tq_batches import read_tags

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

    seconds = 3.0 if quick else 10.0
    result: dict[str, Any] = {"agent": {}, "events": {}, "tags": {}}
    tq.init()
    try:
        for in_flight in IN_FLIGHT:
            command = [sys.executable, "-m", "benchmarks._scale_trainer", str(in_flight), str(seconds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result["agent"][in_flight] = json.loads(done.stdout)
            result["events"][in_flight] = events_at_rate(in_flight, min(seconds, 0.8 * in_flight / RATE))
            result["tags"][in_flight] = tags(in_flight)
    finally:
        tq.close()
    print(f"{'samples in flight':46}" + "".join(f"{in_flight:>11,}" for in_flight in IN_FLIGHT))
    for name, figures in result.items():
        for figure in next(iter(figures.values())):
            print(f"{name + ', ' + figure:46}" + "".join(f"{figures[n][figure]:>11,}" for n in IN_FLIGHT))
    return result


if __name__ == "__main__":
    print(json.dumps(asyncio.run(agent_at_rate(int(sys.argv[1]), float(sys.argv[2])))))
