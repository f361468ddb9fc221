"""Sets the clock of this process forward, so that tests of deadlines do not wait; waits for conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_real = time.monotonic
_ahead = 0.0


def _now() -> float:
    return _real() + _ahead


async def advance(seconds: float) -> None:
    """Set `time.monotonic` of this process forward, and let the event loop run the timers that are due by then.

    asyncio uses this clock, so all its timers are affected. The clock is never set back: timers that were set in the
    meantime would be late.
    """
    global _ahead
    time.monotonic = _now
    _ahead += seconds
    for _ in range(10):
        await asyncio.sleep(0)


async def hastened(awaitable: Awaitable[T]) -> T:
    """Await something of this event loop, whose pauses take no time: the clock is set forward until it is done."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        await advance(0.01)
    return task.result()


async def settle() -> None:
    """Let all tasks of the event loop run as far as they can."""
    for _ in range(30):
        await asyncio.sleep(0)


async def within(awaitable: Awaitable[T]) -> T:
    """Await something, for at most 30 s."""
    return await asyncio.wait_for(awaitable, 30)


async def until(condition: Callable[[], Any]) -> None:
    """Run the event loop until the condition is true, for at most 60 s."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0)
