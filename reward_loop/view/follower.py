"""Keeps an index up to date while a run writes records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from reward_loop.errors import RewardLoopError
from reward_loop.view.index import Index

__all__ = ["Follower"]

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Seconds between two reads of the files. Polling is needed: shared file systems do not report changes."""


class Follower:
    """Reads new rows at intervals, and reports each change of the index.

    Args:
        index: the index.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.problem: str | None = None
        """Why the last attempt to read new rows failed; ``None`` if it succeeded."""

    async def run(self) -> None:
        """Read new rows until `stop` is called."""
        self._loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            try:
                grown = await asyncio.to_thread(self._index.update)
            except (OSError, EOFError, RewardLoopError) as error:
                if self.problem is None:
                    logger.warning("cannot read new records: %s", error)
                self.problem, grown = str(error), False
            else:
                self.problem = None
            if grown:
                async with self._changed:
                    self._changed.notify_all()
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """End `run` and all `revisions`."""
        self._stopping.set()
        async with self._changed:
            self._changed.notify_all()

    def stop_from_signal(self) -> None:
        """End all `revisions`, and `run`; may be called by a signal handler or by another thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.stop(), self._loop)

    async def revisions(self, at_least_every_s: float) -> AsyncIterator[int]:
        """Yield the revision of the index now, after each change, and at least at an interval; ends with `stop`."""
        while not self._stopping.is_set():
            seen = self._index.revision
            yield seen
            try:
                async with asyncio.timeout(at_least_every_s), self._changed:
                    await self._changed.wait_for(lambda: self._stopping.is_set() or self._index.revision != seen)  # noqa: B023
            except TimeoutError:
                continue
