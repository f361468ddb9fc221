"""One step of many samples at a served judge with the server's defaults, whose queue is longer than the deadline."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import chat_complete
from reward_loop.config import LimitConfig, RewardModelConfig
from reward_loop.limits.permit import REWARD_MODEL
from reward_loop.limits.server import serve_limits
from reward_loop.serving import serve_reward_model

pytestmark = pytest.mark.integration  # starts servers

SAMPLES = 320
WORKERS = 4


async def verdict(solution_str: str, reward_router_address: str) -> float:
    await chat_complete(reward_router_address, solution_str, max_tokens=64, temperature=1.0)
    return 1.0


def test_a_full_server_with_its_defaults_fails_no_sample(tiny_generative_model: Path) -> None:
    async def step(address: str, timeout: float, limits: dict[str, LimitConfig]) -> tuple[Counter[str], float]:
        options = RewardLoopConfig(limits=limits, timeout=timeout, retry={"max_attempts": 1})
        with serve_limits(options) as job:
            options = options.model_copy(update={"job": job})
            workers = [ScoringFunction(verdict, options=options) for _ in range(WORKERS)]
            began = time.monotonic()
            results = await asyncio.gather(
                *(
                    workers[number % WORKERS](RewardSample(f"{number}?"), reward_router_address=address)
                    for number in range(SAMPLES)
                )
            )
            for worker in workers:
                worker.close()
        return Counter(str(result.outcome) for result in results), time.monotonic() - began

    async def alone(address: str) -> float:
        """Return the seconds of the slowest of some calls that the server computes alone."""
        slowest = 0.0
        for _ in range(5):
            began = time.monotonic()
            await verdict("?", address)
            slowest = max(slowest, time.monotonic() - began)
        return slowest

    with serve_reward_model(RewardModelConfig(model_path=str(tiny_generative_model))) as served:
        address = served.reward_router_address
        timeout = 2.5 * asyncio.run(alone(address))
        adaptive = {REWARD_MODEL: LimitConfig(adaptive=True, max_wait=None)}
        outcomes, seconds = asyncio.run(step(address, timeout, adaptive))
        assert outcomes == {"scored": SAMPLES}
        assert seconds > 2 * timeout  # otherwise, the server was not full
        # The deadline was too short for a queue: without the limit, samples fail.
        outcomes, _ = asyncio.run(step(address, timeout, {}))
        assert outcomes["failed"] > SAMPLES / 4
