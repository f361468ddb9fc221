"""Requests that are sent again after a transient answer; the table in `scoring/retry.py` shows who repeats what."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from reward_loop._util.transient import DOWN_STATUS, is_refusal
from reward_loop.client.http import server_of, url_of
from reward_loop.errors import RequestError
from reward_loop.limits.call import RequestRetries
from reward_loop.limits.process_call import call_here, pausing
from reward_loop.records import current, waiting_for

__all__ = ["repeated"]

T = TypeVar("T")

_NO_CALL = RequestRetries(1, 0.5, waits_for_outages=False)
"""The attempts of a request outside of a reward function."""

_LONGEST_PAUSE_S = 30.0
"""A service that asks for a longer pause is left to the retries of the function, which release all permits."""


async def repeated(send: Callable[[], Awaitable[T]], address: str | None, attempts: int | None = None) -> T:
    """Send a request, again after each transient error while there are attempts left.

    The pauses do not count towards the deadline of the function. An outage ends the attempts at once: the function
    waits for its end, and is then called again.

    Args:
        send: sends the request once. It releases its own permits before it raises.
        address: where it sends the request to.
        attempts: the largest number of attempts. By default ``retry.max_attempts`` of the function's options, and 1
            outside of a function; answers of a busy service (429, 529, ``Retry-After``) are then left to the retries of
            the function.

    Raises:
        RequestError: the request failed. It is ``final`` if there are no attempts left; repeated answers of a service
            that is down make it ``unreachable``.
    """
    call = call_here()
    retries = _NO_CALL if call is None else call.request_retries
    most = attempts or retries.max_attempts
    attempt = 0
    while True:
        attempt += 1
        try:
            return await send()
        except RequestError as error:
            is_busy = is_refusal(error) or error.retry_after is not None
            if not error.transient or error.unreachable is not None or (is_busy and attempts is None):
                raise
            pause = (error.retry_after or 0.0) + random.uniform(0, retries.first_pause_s * 2 ** (attempt - 1))
            if attempt >= most or pause > _LONGEST_PAUSE_S:
                if not is_busy and call is not None:
                    if error.status in DOWN_STATUS and retries.waits_for_outages:
                        error.unreachable = server_of(url_of(address, ""))
                    else:
                        error.final = True
                raise
        what = "the pause before the next attempt of a request"
        with waiting_for(current(), what) if call is None else pausing(call, what):
            await asyncio.sleep(pause)
