"""How much the router takes on: requests in work, requests that wait, and retries."""

from __future__ import annotations

import asyncio
from collections import deque

from reward_loop.router.router_error import Refusal

__all__ = ["Gate", "RetryBudget"]


class Gate:
    """Lets a number of requests in, makes some wait in order, and refuses more.

    Args:
        max_inside: how many may be inside.
        max_waiting: how many may wait.
    """

    def __init__(self, max_inside: int, max_waiting: int) -> None:
        self.inside = 0
        self.waiting = 0
        self._max_inside = max_inside
        self._max_waiting = max_waiting
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether :meth:`enter` would return at once."""
        return self.inside < self._max_inside and not self.waiting

    def enter_at_once(self) -> bool:
        """Enters if there is room; whoever does must :meth:`leave`."""
        if self.waiting or self.inside >= self._max_inside:
            return False
        self.inside += 1
        return True

    async def enter(self) -> None:
        """Waits for room. Everyone who is inside must :meth:`leave`.

        Raises:
            Refusal: too many wait.
        """
        if self.enter_at_once():
            return
        if self.waiting >= self._max_waiting:
            message = f"{self.inside} requests are in work, and {self.waiting} wait: the router takes no more"
            raise Refusal(503, message, retry_after_s=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            # It may have been let in, and cancelled before it could go.
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        """Makes room for the next one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():  # Otherwise it was cancelled.
                turn.set_result(None)
                return
        self.inside -= 1


class RetryBudget:
    """Bounds retries to a share of the requests, so that they cannot multiply the load on servers that are failing.

    Args:
        share: retries per request.
        reserve: how many more there may be.
    """

    def __init__(self, share: float, reserve: int = 50) -> None:
        self._share = share
        self._most = reserve if share else 0
        self.left: float = self._most

    def earn(self) -> None:
        """A request has come."""
        if self.left < self._most:
            self.left += self._share

    def spend(self) -> bool:
        """Whether there may be a retry; if so it is counted."""
        if self.left < 1:
            return False
        self.left -= 1
        return True
