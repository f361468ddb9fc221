"""The simulated judge of the verl runs, the same for every trainer, with a latency and a concurrency limit.

Latencies come from one seeded sequence, so every run draws the same values in the same order. They are multiplied by
the number in the file ``$JUDGE_SCALE``. ``$JUDGE_LATENCY`` is a list of the shortest and the longest one;
``$JUDGE_CONCURRENCY`` is the maximum number of calls in flight. Of a share ``$JUDGE_ALIKE`` of the prompts (by default
none), all responses get the score 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

_places = asyncio.Semaphore(int(os.environ["JUDGE_CONCURRENCY"]))
_low, _high = json.loads(os.environ["JUDGE_LATENCY"])
_scale = Path(os.environ["JUDGE_SCALE"])
_alike = float(os.environ.get("JUDGE_ALIKE", "0"))
_random = random.Random(0)


def _seconds() -> float:
    return _random.uniform(_low, _high) * float(_scale.read_text())


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the share of digits in the response. A policy learns to increase it within a few steps."""
    async with _places:
        await asyncio.sleep(_seconds())
    if random.Random(ground_truth).random() < _alike:
        return 0.0
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
