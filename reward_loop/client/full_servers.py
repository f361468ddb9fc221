"""Requests that wait for a free place at a full server: one that answers 429, 503 or 529 without a ``Retry-After``."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable

import aiohttp

from reward_loop._util.capacity import FULL_STATUS, LearnedCapacity
from reward_loop._util.retry_after import asked_pause, is_out_of_credit
from reward_loop.errors import RequestError
from reward_loop.limits.call import outside_the_deadline
from reward_loop.limits.lease import report_failure

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
"""The pauses of a process without any request in flight at the server, which is full of those of others."""

_GIVE_UP = 10
"""The number of refusals in a row, without an answer to this process, after which the server counts as broken; and of
refusals of one request, which the server may refuse whatever its load is."""

Answer = tuple[aiohttp.ClientResponse, bytes]


class _Server:
    """A server, as the requests of one event loop see it.

    The router has the same for each of its servers. It is needed here too, because functions also ask servers without a
    router.
    """

    def __init__(self) -> None:
        self.capacity = LearnedCapacity()
        self.refusals = _GIVE_UP
        """The number of refusals since the last answer; without any answer yet, it may be broken."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, *, refused: bool) -> None:
        """Wait for a place; a refused request is the first one."""
        # A new request does not overtake those that wait.
        while not self.capacity.has_free or (self._waiting and not refused):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(turn) if refused else self._waiting.append(turn)
            try:
                with outside_the_deadline("a free place at the server"):
                    await turn
            except asyncio.CancelledError:
                # The cancelled request has got a place at the same moment: it goes to the next one.
                if turn.done() and not turn.cancelled():
                    self._wake()
                raise
            # This request had its turn: if another one was faster, it waits in front of all others.
            refused = True
        self.capacity.begin()

    def leave(self, answered: bool) -> None:
        """Release the place; the next waiting request gets it."""
        self.capacity.end(answered)
        self._wake()

    def _wake(self) -> None:
        free = self.capacity.number - self.capacity.in_flight
        while self._waiting and free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


_servers: dict[asyncio.AbstractEventLoop, dict[str, _Server]] = {}


async def in_a_place(url: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a request when the server has a free place, and again while it is full.

    The wait does not count towards the deadline of the function, nor does the timeout of a request include it. A server
    that refuses requests while it has none of this process is full of others' requests: the pauses then grow.

    Args:
        url: the URL of the request. A server has other places for other endpoints.
        send: sends the request, and returns the answer with its body.

    Returns:
        the answer; one with a status of `FULL_STATUS` only if it has a ``Retry-After``, if the server is broken, or if
        it has refused this request ten times.
    """
    server = _server(url)
    refused = 0
    while True:
        await server.enter(refused=refused > 0)
        answered, pause = False, 0.0
        try:
            response, data = await send()
            # Other errors of the request, such as 400, show that the server has room.
            answered = response.status < 500 and response.status != 429
            if answered:
                server.refusals = 0
            if not _is_full(response, data):
                return response, data
            report_failure(RequestError("", status=response.status))  # to the limits that adapt
            if refused + 1 >= _GIVE_UP:
                return response, data
            if not server.capacity.refused():
                server.refusals += 1
                if server.refusals > _GIVE_UP:
                    return response, data
                # Random, since the other processes of the job wait for the same server.
                pause = min(_FIRST_PAUSE_S * 2**server.refusals, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
        finally:
            server.leave(answered)
        refused += 1
        if pause:
            with outside_the_deadline("a free place at the server"):
                await asyncio.sleep(pause)


def _is_full(response: aiohttp.ClientResponse, data: bytes) -> bool:
    status = response.status
    if status not in FULL_STATUS or asked_pause(response.headers, status) is not None:
        return False
    return not is_out_of_credit(status, data.decode(errors="replace"))


def _server(url: str) -> _Server:
    loop = asyncio.get_running_loop()
    if loop not in _servers:
        for ended in [other for other in _servers if other.is_closed()]:
            del _servers[ended]
        _servers[loop] = {}
    return _servers[loop].setdefault(url, _Server())
