"""Made-up training steps with known answers, and an honest run of the demo."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reward_loop.audit.values import JudgeCalls, Observation

GROUPS, SIZE = 64, 8

DEMO = Path(__file__).parent / "demo_run.csv.gz"
"""The samples of all 24 steps of `make demo`: rewards, components, lengths and durations of judge requests, taken from
the records of that run, with the steps of verl's rollout dumps. The run had no warnings."""


def step(number: int, **changes: Any) -> Observation:
    """A healthy step of 512 samples with random rewards, lengths and responses; ``changes`` replace parts."""
    rng = np.random.default_rng(number)
    count = GROUPS * SIZE
    quality, form = rng.random(count), (rng.random(count) < 0.7).astype(float)
    scores = 0.7 * quality + 0.3 * form
    healthy: dict[str, Any] = {
        "rewards": scores.copy(),
        "groups": np.repeat(np.arange(GROUPS), SIZE),
        "lengths": rng.integers(50, 500, count),
        "scores": scores,
        "components": {"quality": quality, "form": form},
        "responses": [rng.integers(0, 50_000, 200) for _ in range(64)],
        "judges": JudgeCalls(calls=count, seconds=rng.uniform(0.5, 1.5, count)),
    }
    return Observation(step=number, **{**healthy, **changes})


def demo_steps() -> Iterator[Observation]:
    """The steps of the honest run."""
    rows: dict[int, list[dict[str, float]]] = defaultdict(list)
    with gzip.open(DEMO, "rt", newline="") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])].append({name: float(value) for name, value in row.items()})
    for number, samples in rows.items():
        columns = {name: np.array([sample[name] for sample in samples]) for name in samples[0]}
        yield Observation(
            step=number,
            rewards=columns["reward"],
            groups=columns["group"].astype(int),
            lengths=columns["length"].astype(int),
            scores=columns["reward"],
            components={name: columns[name] for name in ("reward_model", "format", "acc")},
            judges=JudgeCalls(calls=len(samples), seconds=columns["judge_s"]),
        )
