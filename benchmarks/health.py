"""Measures what the monitors of reward_loop.health cost the trainer in each step. Needs verl.

    python -m benchmarks.health [--samples N] [--group N] [--tokens N] [--steps N]

Made-up steps with eight components per sample, and responses of 1 to `--tokens` tokens. A dict of tensors takes the
place of TransferQueue; what it takes is measured separately, and subtracted. The last line of the output is JSON:
milliseconds of processor time per step, of everything the trainer does (median and largest), and of the monitors alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from reward_loop.config import RewardLoopConfig
from reward_loop.health import Findings, HealthWatch, Observation
from reward_loop.verl import step_health
from reward_loop.verl.reward_metrics import StepRewards

COMPONENTS = 8


class Queue:
    """The rows of a step, read as from TransferQueue."""

    def __init__(self, keys: list[str], tokens: int, rng: np.random.Generator) -> None:
        self.rows = {key: self._row(int(rng.integers(1, tokens + 1)), float(rng.random())) for key in keys}
        self.seconds = 0.0

    @staticmethod
    def _row(length: int, score: float) -> dict[str, torch.Tensor]:
        scores = torch.zeros(length)
        scores[-1] = score
        return {"rm_scores": scores, "responses": torch.randint(0, 150_000, (length,))}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        began = time.process_time()
        (field,) = select_fields
        data = {field: torch.nested.as_nested_tensor([self.rows[key][field] for key in keys], layout=torch.jagged)}
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
    rewards.add(
        {
            key: {"reward_outcome": "scored", **{f"c{i}": float(rng.random()) for i in range(COMPONENTS)}}
            for key in keys
        },
        {key: float(row["rm_scores"][-1]) for key, row in queue.rows.items()},
    )
    options = RewardLoopConfig()
    no_workers: Any = None  # without records, they are not asked
    health, watch = step_health.StepHealth(options, no_workers), TimedWatch(options.health)
    health._watch = watch
    step_health.tq = queue
    seconds = []
    for number in range(1, steps + 1):
        queue.seconds, began = 0.0, time.process_time()
        assert health.metrics(number, rewards, "train")
        seconds.append(time.process_time() - began - queue.seconds)
    return {
        "ms_median": round(1000 * statistics.median(seconds), 1),
        "ms_largest": round(1000 * max(seconds), 1),
        "monitors_ms": round(1000 * watch.seconds / steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.health", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=5120, help="samples per step (5120)")
    parser.add_argument("--group", type=int, default=16, help="samples per group (16)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the longest response (8192)")
    parser.add_argument("--steps", type=int, default=20, help="steps (20)")
    args = parser.parse_args()
    found = measure(args.samples, args.group, args.tokens, args.steps)
    print(json.dumps({"samples": args.samples, **found}))


if __name__ == "__main__":
    main()
