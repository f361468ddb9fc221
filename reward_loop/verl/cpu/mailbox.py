"""The actor that passes weights from a trainer to rollouts. Does not import verl, which takes seconds."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Mailbox"]


class Mailbox:
    """Holds the references to one set of weights in Ray's object store. A Ray actor with asynchronous methods."""

    def __init__(self) -> None:
        self._weights: asyncio.Future[list[Any]] | None = None

    async def empty(self) -> None:
        """Removes the last weights. `get` then waits for new ones."""
        self._weights = asyncio.get_running_loop().create_future()

    async def put(self, buckets: list[Any]) -> None:
        """Stores weights.

        Args:
            buckets: references to dicts of tensors by name.
        """
        assert self._weights is not None
        self._weights.set_result(buckets)

    async def get(self) -> list[Any]:
        """Waits for the weights, and returns the references."""
        assert self._weights is not None
        return await self._weights
