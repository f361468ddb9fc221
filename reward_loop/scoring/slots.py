"""How many calls run at a time."""

from __future__ import annotations

import asyncio

__all__ = ["Slots"]


class Slots:
    """A semaphore for one event loop after the other.

    asyncio's own belongs to one loop, while a reward function may outlive several (``asyncio.run`` more than once).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._current: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        if self._current is None or self._current[0] is not loop:
            self._current = (loop, asyncio.Semaphore(self._count))
        return self._current[1]
