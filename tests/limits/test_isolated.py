"""Isolated functions have neither limits nor the client: each use ends the run with an error that says what to do."""

import asyncio

import pytest

import reward_loop
from reward_loop import ConfigError, RewardSample, ScoringFunction
from reward_loop.client import chat_complete

pytestmark = pytest.mark.integration  # starts processes


def holds_a_limit():
    with reward_loop.limit("judge"):
        return 1


def asks_a_judge():
    return asyncio.run(chat_complete("127.0.0.1:1", "Rate it."))


def asks_a_service():
    return asyncio.run(chat_complete("http://127.0.0.1:1/v1", "Rate it.", model="judge"))


@pytest.mark.parametrize("function", [holds_a_limit, asks_a_judge, asks_a_service])
async def test_an_isolated_function_that_asks_by_reward_loop_ends_the_run_with_the_way_out(function):
    scoring = ScoringFunction(function, isolation="process", max_processes=1)
    with pytest.raises(ConfigError, match=r"an isolated function cannot ask a judge by reward_loop.*`async def`"):
        await scoring(RewardSample("4"))
    await asyncio.to_thread(scoring.close)
