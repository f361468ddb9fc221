"""Where a trainer leaves its weights for rollouts in other processes. It does not import verl, which takes seconds."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Mailbox"]


class Mailbox:
    """Holds the references to one set of weights in Ray's object store. A Ray actor with asynchronous methods."""

    def __init__(self) -> None:
        self._weights: asyncio.Future[list[Any]] | None = None

    async def empty(self) -> None:
        """Forgets the last weights, and waits for new ones."""
        self._weights = asyncio.get_running_loop().create_future()

    async def put(self, buckets: list[Any]) -> None:
        """Leaves weights: references to dicts of tensors by name."""
        assert self._weights is not None
        self._weights.set_result(buckets)

    async def get(self) -> list[Any]:
        """The references, once they are there."""
        assert self._weights is not None
        return await self._weights
