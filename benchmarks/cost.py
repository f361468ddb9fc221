"""Measures the overhead of the agent: CPU time and memory per sample, for a reward function that does nothing.

Compared with verl 0.9.1's reward worker, which creates one task per sample, decodes the response in the default thread
pool, and then calls the function:

- `like_verl` reproduces this in a few lines, on the same samples.
- If verl is installed, its own manager class and ours run on the same rows of a ``DataProto``.

Each figure is measured in new processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

from reward_loop import NaiveRewardLoopManager, RewardAgent, RewardSample
from reward_loop._util.process import raise_gc_threshold

PAGE = os.sysconf("SC_PAGE_SIZE")
IN_FLIGHT = 20_000
GROUP = 5


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Nothing:
    """A reward function that does nothing. With ``held``, the first ``held`` calls block until the gate is opened."""

    def __init__(self, held: int = 0) -> None:
        self.gate, self.all_called = asyncio.Event(), asyncio.Event()
        self.left = held

    async def asynchronous(self, solution_str: str, **_: Any) -> float:
        if self.left:
            self.left -= 1
            if not self.left:
                self.all_called.set()
            await self.gate.wait()
        return 1.0

    def sync(self, solution_str: str, **_: Any) -> float:
        return 1.0


class Tokenizer:
    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "42"


async def agent(samples: list[Any], function: Any, held: Nothing | None = None, **kwargs: Any) -> dict[str, float]:
    """Score all samples. With ``held``, measure the memory while all samples are in flight."""
    manager = NaiveRewardLoopManager(compute_score=function, **kwargs)
    memory = 0
    async with RewardAgent(manager) as rewards:
        gc.collect()
        before, started = resident(), time.process_time()
        pending = rewards.submit(samples, group_size=GROUP)
        if held is not None:
            await held.all_called.wait()
            memory = resident() - before
            held.gate.set()
        groups = [group async for group in pending]
        cpu = time.process_time() - started
    assert sum(len(group.rewards) for group in groups) == len(samples)
    return {"cpu_us": cpu / len(samples) * 1e6, "kb": memory / len(samples) / 1024}


async def like_verl(samples: list[Any], function: Any) -> dict[str, float]:
    loop, tokenizer = asyncio.get_running_loop(), Tokenizer()

    async def run_single(sample: RewardSample) -> dict[str, Any]:
        response = await loop.run_in_executor(None, lambda: tokenizer.decode(None, skip_special_tokens=True))
        score = await function(
            data_source=sample.data_source,
            solution_str=response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        return {"reward_score": score, "reward_extra_info": {"acc": score}}

    started = time.process_time()
    rewards = await asyncio.gather(*(asyncio.create_task(run_single(sample)) for sample in samples))
    assert len(rewards) == len(samples)
    return {"cpu_us": (time.process_time() - started) / len(samples) * 1e6}


async def verls_own(rows: list[Any], function: Any) -> dict[str, float]:
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    manager = NaiveRewardManager(OmegaConf.create({}), Tokenizer(), function)
    started = time.process_time()
    rewards = await asyncio.gather(*(asyncio.create_task(manager.run_single(row)) for row in rows))
    assert len(rewards) == len(rows)
    return {"cpu_us": (time.process_time() - started) / len(rows) * 1e6}


def verl_rows(count: int) -> list[Any]:
    import numpy as np
    import torch
    from verl import DataProto

    def column(make: Any) -> Any:
        array = np.empty(count, dtype=object)
        array[:] = [make(i) for i in range(count)]
        return array

    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(count, 16, dtype=torch.long),
            "responses": torch.ones(count, 128, dtype=torch.long),
            "attention_mask": torch.ones(count, 144, dtype=torch.long),
        },
        non_tensors={
            "data_source": column(lambda i: "math"),
            "reward_model": column(lambda i: {"ground_truth": "42"}),
            "extra_info": column(lambda i: {"index": i}),
        },
    )
    return [data[i : i + 1] for i in range(count)]


async def measure(what: str, count: int) -> dict[str, float]:
    if what in ("verl", "ours_on_rows"):
        rows = verl_rows(count)
        nothing = Nothing().asynchronous
        if what == "verl":
            return await verls_own(rows, nothing)
        return await agent(rows, nothing, tokenizer=Tokenizer())
    samples = [RewardSample(f"answer {i}", "math", "42", {"index": i}) for i in range(count)]
    if what == "in_flight_uncollected":
        gc.disable()
    if what == "in_flight_tuned":
        raise_gc_threshold()
    if what.startswith("in_flight"):
        held = Nothing(held=count)
        return await agent(samples, held.asynchronous, held)
    if what == "like_verl":
        return await like_verl(samples, Nothing().asynchronous)
    return await agent(samples, Nothing().sync if what == "sync" else Nothing().asynchronous)


def best(what: str, count: int, runs: int) -> dict[str, float]:
    """Measure in ``runs`` new processes, and return the minimum of each figure: other load only adds time."""
    results = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cost", what, str(count)], stdout=subprocess.PIPE, text=True, check=True
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: min(result[key] for result in results) for key in results[0]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], int(sys.argv[2])))))
