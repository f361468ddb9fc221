from __future__ import annotations

import asyncio

import pytest

from reward_loop.router.app import TimeLimit
from reward_loop.router.messages import Refusal
from reward_loop.router.proxy import Gate


async def enter(gate: Gate) -> None:
    if not gate.enter_now():
        await gate.wait()


async def test_the_gate_lets_in_some_makes_some_wait_in_order_and_refuses_more() -> None:
    gate = Gate(1, 2)
    assert gate.enter_now()
    order: list[int] = []

    async def arrive(number: int) -> None:
        await enter(gate)
        order.append(number)

    waiting = [asyncio.create_task(arrive(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="is full") as refused:
        await enter(gate)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    gate.leave()
    assert not gate.enter_now()  # The place is that of the first one that waits.
    await waiting[0]
    gate.leave()
    await waiting[1]
    assert order == [1, 2]
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_cancelled_waiter_keeps_no_place() -> None:
    gate = Gate(1, 5)
    assert gate.enter_now()
    first, second, third = (asyncio.create_task(enter(gate)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    gate.leave()  # `first` is not aware of it yet.
    second.cancel()  # It was let in, and never went.
    await asyncio.wait([first, second, third])
    assert third.exception() is None
    assert (gate.inside, gate.waiting) == (1, 0)
    gate.leave()
    assert (gate.inside, gate.waiting) == (0, 0)


async def limited(limit: TimeLimit, event: asyncio.Event) -> bool:
    """Waits for the event; returns whether the limit was exceeded first."""
    task = asyncio.current_task()
    assert task is not None
    limit.start(task)
    try:
        await event.wait()
    except asyncio.CancelledError:
        return limit.is_exceeded(task)
    finally:
        limit.stop(task)
    return False


async def test_tasks_are_cancelled_at_their_deadlines_and_not_after_their_end() -> None:
    limit = TimeLimit(0.2)
    ending, never = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(limited(limit, ending))
    late = [asyncio.create_task(limited(limit, never)) for _ in range(2)]
    await asyncio.sleep(0)
    ending.set()
    async with asyncio.timeout(30):
        assert await asyncio.gather(first, *late) == [False, True, True]
        assert await limited(limit, never)  # The timer starts again.


async def test_a_task_that_is_cancelled_before_has_not_exceeded_the_limit() -> None:
    limit = TimeLimit(60)
    task = asyncio.create_task(limited(limit, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task is False
    limit.close()
