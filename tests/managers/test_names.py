"""Names of verl's managers that stand for options of `naive`."""

from __future__ import annotations

import asyncio
import os

import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.config import LimitConfig, RewardLoopConfig
from reward_loop.managers import get
from reward_loop.managers.registry import with_options_of
from reward_loop.managers.scorer import load_scorer


def process_id() -> int:
    return os.getpid()


@pytest.mark.processes
@pytest.mark.parametrize("name", ["remote", "prime"])
async def test_the_function_runs_in_a_process(name: str) -> None:
    assert get(name) is NaiveRewardLoopManager
    scorer = load_scorer(process_id, name, RewardLoopConfig(timeout=60))
    try:
        reward = await scorer.manager.run_single(RewardSample(""))
    finally:
        await asyncio.to_thread(scorer.manager.close)
    assert reward["reward_score"] != os.getpid()
    assert scorer.function.timeout == 60


def test_rate_limited_has_verls_default_limit() -> None:
    scorer = load_scorer(process_id, "rate_limited", RewardLoopConfig())
    assert scorer.manager.limits is scorer.function.limits
    assert scorer.manager.options.limits == {"default": LimitConfig(max_concurrent=1)}


def test_options_that_are_given_stay() -> None:
    limits = {"default": LimitConfig(max_concurrent=7), "judge": LimitConfig(requests_per_minute=3)}
    assert with_options_of("rate_limited", RewardLoopConfig(limits=limits)).limits == limits
    judge = {"judge": limits["judge"]}
    assert with_options_of("rate_limited", RewardLoopConfig(limits=judge)).limits.keys() == {"default", "judge"}
    assert with_options_of("remote", RewardLoopConfig(isolation="thread")).isolation == "thread"
    options = RewardLoopConfig()
    assert with_options_of("naive", options) is options
