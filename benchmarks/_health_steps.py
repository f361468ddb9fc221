"""The steps of `benchmarks.health`, with torch and verl."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from reward_loop.audit.monitors import Findings, HealthWatch
from reward_loop.audit.values import Observation
from reward_loop.config import RewardLoopConfig
from reward_loop.verl import tq_rows
from reward_loop.verl.reward_metrics import StepRewards, TrajectoryReward
from reward_loop.verl.step_health import StepHealth

COMPONENTS = 8


class Queue:
    """The rows of a step, read as from TransferQueue."""

    def __init__(self, keys: list[str], tokens: int, rng: np.random.Generator) -> None:
        self.rows = {key: torch.randint(0, 150_000, (int(rng.integers(1, tokens + 1)),)) for key in keys}
        self.seconds = 0.0

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        began = time.process_time()
        (field,) = select_fields
        data = {field: torch.nested.as_nested_tensor([self.rows[key] for key in keys], layout=torch.jagged)}
        self.seconds += time.process_time() - began
        return data


class TimedWatch(HealthWatch):
    """Adds up the seconds of the monitors."""

    seconds = 0.0

    def check(self, observation: Observation) -> Findings:
        began = time.process_time()
        try:
            return super().check(observation)
        finally:
            self.seconds += time.process_time() - began


def measure(samples: int, group: int, tokens: int, steps: int) -> dict[str, float]:
    """Return milliseconds of processor time per step."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    keys = [f"{i // group:08x}_{i % group}_0" for i in range(samples)]
    queue = Queue(keys, tokens, rng)
    rewards = StepRewards()
    for key, response in queue.rows.items():
        info = {"reward_outcome": "scored", **{f"c{i}": float(rng.random()) for i in range(COMPONENTS)}}
        score = float(rng.random())
        rewards.trajectories[key] = TrajectoryReward(info, score, raw_score=score, tokens=len(response))
    options = RewardLoopConfig()
    no_workers: Any = None  # without records, they are not asked
    health, watch = StepHealth(options, no_workers, str), TimedWatch(options.health)
    health._watch = watch
    tq_rows.tq = queue
    seconds = []
    for number in range(1, steps + 1):
        queue.seconds, began = 0.0, time.process_time()
        assert health.metrics(number, rewards)
        seconds.append(time.process_time() - began - queue.seconds)
    return {
        "ms_median": round(1000 * statistics.median(seconds), 1),
        "ms_largest": round(1000 * max(seconds), 1),
        "monitors_ms": round(1000 * watch.seconds / steps, 1),
    }
