from __future__ import annotations

import asyncio

import pytest

from reward_loop.router.limits import Gate, RetryBudget
from reward_loop.router.router_error import Refusal


async def test_the_gate_lets_in_some_makes_some_wait_in_order_and_refuses_more() -> None:
    gate = Gate(1, 2)
    await gate.enter()
    order: list[int] = []

    async def enter(number: int) -> None:
        await gate.enter()
        order.append(number)

    waiting = [asyncio.create_task(enter(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="is full") as refused:
        await gate.enter()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    gate.leave()
    await waiting[0]
    gate.leave()
    await waiting[1]
    assert order == [1, 2]
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_cancelled_waiter_keeps_no_permit() -> None:
    gate = Gate(1, 5)
    await gate.enter()
    first, second, third = (asyncio.create_task(gate.enter()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    gate.leave()  # `first` is not aware of it yet.
    second.cancel()  # It was let in, and never went.
    await asyncio.wait([first, second, third])
    assert third.exception() is None
    assert (gate.inside, gate.waiting) == (1, 0)
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.5, reserve=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    assert not RetryBudget(0).spend()
