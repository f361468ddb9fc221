"""A reward function that counts its own calls."""

from __future__ import annotations

import asyncio


class Counting:
    """Returns 1.0; ``peak`` is the maximum number of concurrent calls."""

    def __init__(self) -> None:
        self.running = 0
        self.peak = 0

    async def __call__(self) -> float:
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return 1.0
