"""The states of an outage, without a judge: which calls get their turn, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from reward_loop.limits.outages import Outage, Outages
from tests.clock import advance

Waiting = tuple[Outages, Outage, list[asyncio.Task[bool]]]


@pytest.fixture
async def waiting() -> AsyncIterator[Waiting]:
    """Yield outages, the outage of the judge ``j``, and six calls that wait for its end."""
    outages = Outages(600.0, asyncio.get_running_loop())
    outage = outages.failed("j")
    calls = [asyncio.create_task(outage.turn()) for _ in range(6)]
    await asyncio.sleep(0)
    yield outages, outage, calls
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def turns(calls: list[asyncio.Task[bool]]) -> int:
    return sum(call.done() for call in calls)


async def test_a_judge_that_fails_again_is_away_until_it_answers(waiting: Waiting) -> None:
    outages, outage, calls = waiting
    outages.answered("j")
    await asyncio.sleep(0)
    assert (outage.is_back, turns(calls)) == (True, 1)
    outages.failed("j")
    await advance(0.3)
    assert (outage.is_back, turns(calls)) == (False, 2)  # the second one is the probe
    outages.ended(outage)
    outages.answered("j")
    for _ in range(3):
        await advance(0.3)
    assert (outage.is_back, turns(calls)) == (True, 6)


async def test_a_probe_that_does_not_fail_lets_others_ask_but_is_not_an_answer(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    outages, outage, calls = waiting
    await advance(0.3)
    assert turns(calls) == 1
    await advance(10)
    assert turns(calls) == 1
    for _ in range(4):
        await advance(6)
    assert turns(calls) == 6
    assert not outage.is_back
    assert outages.is_away("j")
    assert "answers again" not in caplog.text


async def test_the_end_of_a_call_without_an_answer_gives_the_turn_to_one_other_call(waiting: Waiting) -> None:
    outages, outage, calls = waiting
    for probe in range(1, 4):
        await advance(5)
        assert (outage.is_back, turns(calls)) == (False, probe)
        outages.ended(outage)


async def test_the_end_of_a_call_at_its_deadline_does_not_stop_others_that_may_be_connected(waiting: Waiting) -> None:
    outages, outage, calls = waiting
    await advance(0.3)
    await advance(15.1)
    assert turns(calls) == 2
    outages.ended(outage)  # the first one
    for _ in range(3):
        await advance(0.3)
    assert (outage.is_back, turns(calls)) == (False, 6)


async def test_a_failure_stops_the_others_until_the_next_probe(waiting: Waiting) -> None:
    outages, outage, calls = waiting
    await advance(0.3)
    await advance(15.1)
    outages.failed("j")
    outages.ended(outage)
    await advance(10)
    assert turns(calls) == 3
    await advance(10)
    assert turns(calls) == 3
