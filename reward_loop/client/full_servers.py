"""Requests that wait for a free place at a full server: one that answers 429, 503 or 529 without a ``Retry-After``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from reward_loop._util.backoff import Backoff
from reward_loop._util.retry_after import asked_pause, is_incurable, is_out_of_credit
from reward_loop._util.transient import RouterCode
from reward_loop.limits.call import outside_the_deadline
from reward_loop.limits.lease import report_answer

_FULL_STATUS = frozenset({429, 503, 529})

_MOST_REFUSALS = 10
"""The number of refusals of one request, after which its last answer counts: the server may refuse it whatever its load
is."""

Answer = tuple[aiohttp.ClientResponse, bytes]


async def in_a_place(send: Callable[[], Awaitable[Answer]]) -> Answer:
    """Send a request, and again after growing pauses while the server is full; return the answer with its body.

    The pauses do not count towards the deadline of the function, nor does the timeout of a request include them.
    """
    backoff = Backoff()
    for _ in range(_MOST_REFUSALS - 1):
        response, data = await send()
        if not _is_full(response, data):
            return response, data
        report_answer(False)
        with outside_the_deadline("a free place at the server"):
            await asyncio.sleep(backoff.next_s())
    return await send()


def _is_full(response: aiohttp.ClientResponse, data: bytes) -> bool:
    if response.status not in _FULL_STATUS:
        return False
    status, text = response.status, data.decode(errors="replace")
    # The router has a place, but no server: an outage, in which one call asks for all.
    has_cause = RouterCode.NO_SERVER_UP in text or is_out_of_credit(status, text) or is_incurable(status, text)
    return not has_cause and asked_pause(response.headers, status, text) is None
