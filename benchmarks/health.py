"""Measures what the monitors of reward_loop.health cost the trainer in each step.

    python -m benchmarks.health [--samples N] [--group N] [--tokens N] [--steps N]

Made-up steps with eight components per sample, and responses of up to `--tokens` tokens, of which the monitors read as
many as in a run. Reading TransferQueue is not part of it; verl's own metrics read the same rows. The last line of the
output is JSON: milliseconds of processor time per step (median and largest).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from reward_loop.config import HealthConfig
from reward_loop.health import HealthWatch, JudgeCalls, Observation

COMPONENTS = 8


def make_step(number: int, samples: int, group: int, tokens: int, options: HealthConfig) -> Observation:
    """Return a step with random numbers."""
    rng = np.random.default_rng(number)
    components = {f"component_{i}": rng.random(samples) for i in range(COMPONENTS)}
    scores = np.sum(list(components.values()), axis=0) / COMPONENTS
    length = min(tokens, options.sampled_tokens)
    return Observation(
        step=number,
        rewards=scores,
        groups=np.arange(samples) // group,
        lengths=rng.integers(1, tokens + 1, samples),
        scores=scores,
        components=components,
        responses=[rng.integers(0, 150_000, length) for _ in range(min(samples, options.sampled_responses))],
        judges=JudgeCalls(calls=samples, seconds=rng.random(samples)),
    )


def measure(samples: int, group: int, tokens: int, steps: int) -> dict[str, float]:
    """Return the milliseconds of processor time of a step."""
    options = HealthConfig()
    watch = HealthWatch(options)
    seconds = []
    for number in range(1, steps + 1):
        observation = make_step(number, samples, group, tokens, options)
        began = time.process_time()
        watch.check(observation)
        seconds.append(time.process_time() - began)
    return {"ms_median": round(1000 * statistics.median(seconds), 1), "ms_largest": round(1000 * max(seconds), 1)}


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
