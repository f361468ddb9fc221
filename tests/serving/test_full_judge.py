"""A step of many samples at a judge of the run, with the defaults of both: its queue is longer than the deadline."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.client import chat_complete
from reward_loop.limits.local import LocalLimits
from reward_loop.serving import serve_reward_model
from reward_loop.verl.run.services import PLACES, with_limits_of_models
from tests.verl.configs import resolved

pytestmark = pytest.mark.integration  # starts servers

SAMPLES = 1024
WORKERS = 4


async def verdict(solution_str: str, reward_router_address: str) -> float:
    await chat_complete(reward_router_address, solution_str, max_tokens=16, temperature=1.0)
    return 1.0


async def step(address: str, samples: int, options: RewardLoopConfig) -> tuple[Counter[str], float]:
    """Score samples that arrive at once, in workers that share the limits; return their outcomes, and the seconds."""
    limits = LocalLimits(options)
    workers = [ScoringFunction(verdict, options=options, limits=limits) for _ in range(WORKERS)]
    began = time.monotonic()
    results = await asyncio.gather(
        *(workers[n % WORKERS](RewardSample(f"{n}?"), reward_router_address=address) for n in range(samples))
    )
    for worker in workers:
        worker.close()
    return Counter(str(result.outcome) for result in results), time.monotonic() - began


def test_a_full_judge_of_the_run_fails_no_sample(tiny_generative_model: Path) -> None:
    settings = with_limits_of_models(
        resolved(
            "reward_model.enable=True",
            "reward_model.rollout.name=transformers",
            f"reward_model.model.path={tiny_generative_model}",
            "reward_loop.retry.max_attempts=1",
        )
    )
    assert settings.model is not None
    with serve_reward_model(settings.model) as served:
        address = served.reward_router_address
        asyncio.run(step(address, PLACES, settings.options))  # the first requests of a server are slow
        _, places_s = asyncio.run(step(address, PLACES, settings.options))
        # A deadline that all places meet, and the whole step does not, even on a machine that is slower for a while.
        options = settings.options.model_copy(update={"timeout": 5 * places_s})
        outcomes, seconds = asyncio.run(step(address, SAMPLES, options))
        assert outcomes == {"scored": SAMPLES}
        assert seconds > 1.5 * options.timeout  # otherwise, the judge was not full
        # Without the places, samples fail in the queue of the server.
        outcomes, _ = asyncio.run(step(address, SAMPLES, options.model_copy(update={"limits": {}})))
        assert outcomes["failed"] > SAMPLES / 4
