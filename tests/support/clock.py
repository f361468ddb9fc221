"""Sets the clock of this process forward, so that tests of deadlines do not wait; waits for conditions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

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


async def until(condition: Callable[[], Any]) -> None:
    """Run the event loop until the condition is true, for at most 60 s."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0)
