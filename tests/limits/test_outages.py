"""The states of an outage, without a judge: which calls get their turn, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from reward_loop.limits.outages import FORGET_S, JudgeAddress, Outage, Outages
from tests.support.clock import advance

JUDGE = JudgeAddress("http://j:1")


class Calls:
    """Six calls that wait for the end of an outage; each asks until `end` is set."""

    def __init__(self, outage: Outage) -> None:
        self.asked: list[int] = []
        self.ends = [asyncio.Event() for _ in range(6)]
        self.tasks = [asyncio.create_task(self._call(outage, number)) for number in range(6)]

    async def _call(self, outage: Outage, number: int) -> None:
        async with outage.turn() as may_ask:
            if may_ask:
                self.asked.append(number)
                await self.ends[number].wait()


@pytest.fixture
async def outages() -> Outages:
    return Outages(600.0)


@pytest.fixture
async def calls(outages: Outages) -> AsyncIterator[Calls]:
    calls = Calls(outages.failed(JUDGE))
    await asyncio.sleep(0)
    yield calls
    for call in calls.tasks:
        call.cancel()
    await asyncio.gather(*calls.tasks, return_exceptions=True)


async def test_one_call_at_a_time_asks_and_any_answer_lets_all_go_on(outages: Outages, calls: Calls) -> None:
    await advance(0.1)
    assert calls.asked == []
    for number in range(3):
        await advance(6)
        assert calls.asked == list(range(number + 1))
        await advance(60)  # it asks for long
        calls.ends[number].set()  # without an answer
        await advance(0)
    assert outages.is_away(JUDGE)
    await asyncio.to_thread(outages.answered, JUDGE)
    await advance(0)
    assert calls.asked == [0, 1, 2, 3, 4, 5]
    assert not outages.open


async def test_the_cancellation_of_a_call_gives_the_turn_to_another_one(outages: Outages, calls: Calls) -> None:
    calls.tasks[0].cancel()  # it waits
    await advance(1)
    assert calls.asked == [1]
    calls.tasks[1].cancel()  # it asks
    await advance(0)
    await advance(2)
    assert calls.asked == [1, 2]


async def test_after_the_bound_no_call_waits_until_an_answer(outages: Outages, calls: Calls) -> None:
    await advance(601)
    await asyncio.gather(*calls.tasks[1:])
    assert calls.asked == [0]
    async with outages.failed(JUDGE).turn() as may_ask:
        assert not may_ask
    assert not outages.is_away(JUDGE)
    outages.answered(JUDGE)
    assert outages.failed(JUDGE).left_s > 599


async def test_a_failure_long_after_the_last_one_is_another_outage(outages: Outages) -> None:
    first = outages.failed(JUDGE)
    await advance(FORGET_S - 1)
    assert outages.failed(JUDGE) is first
    await advance(FORGET_S + 1)
    assert outages.failed(JUDGE) is not first


async def test_models_at_one_address_have_outages_of_their_own(outages: Outages) -> None:
    fast, strong = (outages.failed(JUDGE._replace(model=model)) for model in ("fast", "strong"))
    outages.answered(JUDGE._replace(model="fast"))
    assert (str(strong.judge), list(outages.open.values())) == ("judge http://j:1 (model strong)", [strong])
    assert fast is not strong
