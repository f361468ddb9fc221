"""The judge of the verl runs, the same for every trainer: it takes its time, and serves a few calls at a time.

Latencies come from one seeded sequence, so that every run draws the same ones in the same order. They are multiplied
with the number in the file ``$JUDGE_SCALE``.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from reward_loop.agent.latency import parse_latency

_places = asyncio.Semaphore(int(os.environ["JUDGE_CONCURRENCY"]))
_latency = parse_latency(os.environ["JUDGE_LATENCY"])
_scale = Path(os.environ["JUDGE_SCALE"])
_random = random.Random(0)


def _seconds() -> float:
    return _latency.draw(_random) * float(_scale.read_text())


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the share of digits in the response, which a policy learns to raise within some steps."""
    async with _places:
        await asyncio.sleep(_seconds())
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
