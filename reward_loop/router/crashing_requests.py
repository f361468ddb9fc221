"""Requests that break servers: sent again and again, such a request would crash one server after another.

- A request that was alone on two servers when they died is refused for good.
- If other requests were in flight too, at one of the deaths, any of them may be the cause. Those with two dead servers
  are then sent one at a time, and one whose server dies again is refused for good; the others are answered.
- A reset connection does not count. A server has died if its owner reports the death, or if a health check fails.
- Requests are remembered by path and body, because clients also repeat requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

from reward_loop._util.text import shorten
from reward_loop._util.transient import RouterCode
from reward_loop.router.backend import Backend
from reward_loop.router.client_request import ClientRequest
from reward_loop.router.error_answers import Refusal
from reward_loop.router.pool import BackendPool

_REMEMBERED = 256
"""The number of requests that are remembered."""


class _Break(NamedTuple):
    """A server that may have died of a request."""

    backend: Backend
    began: float
    """When the request began there, in seconds of `time.monotonic`."""
    ended: float
    was_alone: bool
    """Whether no other request was there."""


_Broken = list[_Break]


class BreakingRequests:
    """The requests that may break servers.

    Args:
        pool: the servers.
    """

    def __init__(self, pool: BackendPool) -> None:
        self.pool = pool
        self.turn = asyncio.Lock()
        """Held by the suspect that is sent to a server."""
        self.known: OrderedDict[bytes, _Broken | Refusal] = OrderedDict()

    def suspect(self, client: ClientRequest, body: bytes) -> Suspect:
        """Return what is known of a request. Call its :meth:`Suspect.close` at the end of the request.

        Raises:
            Refusal: the request broke servers before.
        """
        known = self.known.get(_digest(client.path, body)) if self.known else None
        if isinstance(known, Refusal):
            raise known
        return Suspect(self, client, body, known or [])


class Suspect:
    """A request that may break servers. For arguments, see `BreakingRequests.suspect`."""

    def __init__(self, breaking: BreakingRequests, client: ClientRequest, body: bytes, broken: _Broken) -> None:
        self._breaking = breaking
        self._client = client
        self._body = body
        self._broken = broken
        self._needs_turn = self._has_turn = False

    async def broke(self, backend: Backend, seconds: float, was_alone: bool) -> None:
        """Record that a server may have died of the request.

        Args:
            backend: the server.
            seconds: how long the request was there.
            was_alone: whether no other request was in flight on the server.

        Raises:
            Refusal: the request breaks servers.
        """
        now = time.monotonic()
        # The socket of a dead server can accept connections until it is restarted, so one death may break several.
        same = [found for found in self._broken if found.backend is backend]
        if same and backend.healthy_at < same[-1].ended:
            self._broken.remove(same[-1])
            seconds, was_alone = now - same[-1].began, was_alone and same[-1].was_alone
        self._broken.append(_Break(backend, now - seconds, now, was_alone))
        if len(self._broken) < 2:
            self._remember(self._broken)
            return
        # Only now, since it waits for a health check: one broken connection is repeated at once.
        died = [one for one in self._broken if await self._breaking.pool.has_died(one.backend, one.began, one.ended)]
        if len(died) < 2:
            return
        if self._has_turn or sum(one.was_alone for one in died) >= 2:
            servers = " and ".join(one.backend.url for one in died)
            message = (
                f"this request breaks servers: {servers} died while it was in flight. It is not sent again. "
                f"{self._client.name}, {shorten(self._body.decode(errors='replace'))}"
            )
            refusal = Refusal(422, message, code=RouterCode.REQUEST_BREAKS_SERVERS)
            self._remember(refusal)
            raise refusal
        self._needs_turn = True

    async def wait_for_turn(self) -> None:
        """Wait until the request may be sent again: if two servers died, until no other suspect is sent."""
        # Held until `close`: a death while this request is the only suspect convicts it.
        if self._needs_turn and not self._has_turn:
            await self._breaking.turn.acquire()
            self._has_turn = True

    def answered(self) -> None:
        """Record that a server answered the request, and forget it."""
        if self._broken:
            # Others were the cause: an innocent request must not be refused after a later death.
            self._breaking.known.pop(_digest(self._client.path, self._body), None)
            self._broken = []

    def close(self) -> None:
        """Let the next suspect be sent."""
        if self._has_turn:
            self._breaking.turn.release()

    def _remember(self, known: _Broken | Refusal) -> None:
        remembered = self._breaking.known
        remembered[_digest(self._client.path, self._body)] = known
        if len(remembered) > _REMEMBERED:
            remembered.popitem(last=False)


def _digest(path: str, body: bytes) -> bytes:
    # The path may be long, `person` is at most 16 bytes; the ends of paths differ.
    return blake2b(body, person=path.encode()[-16:], digest_size=16).digest()
