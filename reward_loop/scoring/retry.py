"""Calls of a function that are made again, and the rule which part of the library repeats what.

Each cause is repeated in one place only:

============================================== ==================================== ===================================
Cause                                          Repeated by                          Bound
============================================== ==================================== ===================================
A server answered nothing, 429 or 5xx to the   the router (`router/proxy.py`), on   four servers
router, and another one is up                  another server
A connection to ``host:port`` was lost         `client/http.py`, the request        once
408, 409, 425, 5xx, or an unusable answer, to  the client (`client/http.py`),       ``retry.max_attempts`` requests, or
a request of `reward_loop.client`              the request                          ``attempts`` of a `Judge`
429, 529 or ``Retry-After``: a busy service    the function: its permits must be    ``retry.max_seconds``
                                               free meanwhile. Only a `Judge` with
                                               ``attempts`` repeats its request first
The judge cannot be reached                    the function, after the outage       ``outage_timeout_s``
(`limits/outages.py`); a gateway's 502, 503,
504, or its page, again and again
Another transient error of the function: of    the function                         ``retry.max_attempts`` calls within
its own client, `TransientError`                                                    ``retry.max_seconds``
A reward worker died                           `verl/workers/reward_workers.py`,    ``MAX_TASK_RETRIES``
                                               the sample
============================================== ==================================== ===================================

What one place has repeated as often as allowed, no other repeats: such a `RequestError` is ``final``. Also final is an
answer with the code `RouterCode.REQUEST_BREAKS_SERVERS`.

Invariants of the repeated calls of a function:

- An attempt that the service refused or asked to repeat later (HTTP 429, 529, or a ``Retry-After``) does not use up
  `max_attempts`: a busy service loses no sample. Nor does an attempt in an outage, unless the judge has answered other
  calls since the failure before: then the sample is the cause. All other failed attempts do.
- A repeated call keeps the age of its sample, by which permits are granted.
- The pauses between attempts grow, also those that the service asked for, so the number of refused attempts is small.
- Only an answer of the judge ends its outage. A call that has its turn and ends without one, such as without a permit,
  passes the turn to another call.
- `max_seconds` ends all of it. Time spent waiting for limits or in an outage does not count.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable

from reward_loop._util.retry_after import Backoff
from reward_loop._util.transient import (
    address_of,
    is_refusal,
    is_transient,
    model_of,
    retry_after,
    status_of,
    unreachable,
)
from reward_loop.errors import DOWN_STATUS
from reward_loop.limits.options import RetryConfig
from reward_loop.limits.outages import JudgeAddress, Outages
from reward_loop.processes.outcome import CallOutcome
from reward_loop.records import current, waiting_for

_NEVER_REACHED = " This address has never answered this process: check the address."


class Retry:
    """Repeats a call with growing pauses while it fails with a transient error, and after outages.

    Args:
        config: the maximum number of attempts, the maximum total time, and the pauses.
        sleep: awaited for each pause, with its length in seconds; tests replace it.
    """

    def __init__(self, config: RetryConfig, sleep: Callable[[float], Awaitable[None]] | None = None) -> None:
        self.config = config
        self._sleep = sleep or _sleep

    async def again(
        self,
        first: CallOutcome,
        attempt: Callable[[int], Awaitable[CallOutcome]],
        started: float,
        outages: Outages | None = None,
        function: str = "",
    ) -> CallOutcome:
        """Repeat until an attempt succeeds or fails permanently, or the attempts or the total time are used up.

        Args:
            first: the outcome of the first attempt.
            attempt: makes one more attempt; it receives the attempt's number, from 2.
            started: start of the first attempt by `time.monotonic`; `config.max_seconds` counts from there.
            outages: the outages that the call waits for; ``None`` to treat them as other transient errors.
            function: the name of the function, which stands for an address that its errors do not have.

        Returns:
            The outcome of the last attempt, successful or not, with the times and calls of all attempts.
        """
        outcomes = [first]
        backoff = Backoff(self.config.initial_wait, self.config.max_wait)
        counted = lost = 0
        outage_s = 0.0
        away: JudgeAddress | None = None
        failed_at = math.inf
        while (error := outcomes[-1].exception) is not None:
            before, judge = away, None if outages is None else self._away(error, counted, function)
            if outages is not None and judge is not None:
                # If the judge has answered others since the failure before, this sample may be what it cannot answer.
                lost += judge == before and outages.answered_at.get(judge, -math.inf) > failed_at
                if lost >= max(1, self.config.max_attempts - 1):
                    break
                away, failed_at = judge, time.monotonic()
                # Only of our own client is every answer known.
                is_known = judge in outages.answered_at or model_of(error) is None
                outage = outages.failed(judge, "" if is_known else _NEVER_REACHED)
                async with outage.turn() as may_ask:
                    outage_s += time.monotonic() - failed_at
                    if not may_ask:
                        outcomes[-1].note = outage.given_up()
                        break
                    outcomes.append(await attempt(len(outcomes) + 1))
            else:
                if self.config.max_attempts == 1 or not is_transient(error):
                    break
                pause = (retry_after(error) or 0.0) + backoff.next_s()
                counted += not _is_postponed(error)
                elapsed = time.monotonic() - started - outage_s - sum(outcome.wait_s for outcome in outcomes)
                # Before the pause: after it, an attempt would be too late.
                if counted >= self.config.max_attempts or elapsed + pause >= self.config.max_seconds:
                    break
                await self._sleep(pause)
                outcomes.append(await attempt(len(outcomes) + 1))
            if outages is not None and away is not None and _is_answered(outcomes[-1], away):
                outages.answered(away)
        last = outcomes[-1]
        last.attempts = sum(outcome.attempts for outcome in outcomes)
        last.work_s = sum(outcome.work_s for outcome in outcomes)
        last.queue_s = sum(outcome.queue_s for outcome in outcomes)
        last.wait_s = max(0.0, time.monotonic() - started - last.work_s - last.queue_s)
        last.outage_s = outage_s
        return last

    def _away(self, error: BaseException, counted: int, function: str) -> JudgeAddress | None:
        """Return the judge that could not be reached, also by the last of several attempts.

        ``None`` if the error has another cause.
        """
        address = unreachable(error)
        is_last = counted + 1 >= self.config.max_attempts
        if address is None and is_last and status_of(error) in DOWN_STATUS and not _is_postponed(error):
            address = address_of(error) if is_transient(error) else None
        if address is None:
            return None
        return JudgeAddress(address, model_of(error) or "") if address else JudgeAddress("", function=function)


def _is_answered(outcome: CallOutcome, away: JudgeAddress) -> bool:
    """Return whether the judge answered a call: the function returned, or raised an error that the judge sent.

    Other errors show nothing: the function may have been stopped, or have failed, before the judge answered. If it did
    answer, `reward_loop.client` has recorded that.
    """
    error = outcome.exception
    if error is None:
        return outcome.error is None
    status = status_of(error)
    # Below 400, the answer is not what the client expects, such as the page of a gateway.
    if status is None or status < 400 or (status in DOWN_STATUS and not _is_postponed(error)):
        return False
    address = address_of(error)
    return not address or not away.address or _server_of(address) == _server_of(away.address)


def _server_of(address: str) -> str:
    """Return host and port of an address, which each client writes in its own form, such as without the usual port."""
    scheme, _, server = address.rpartition("://")
    if re.search(r":\d+$", server) is None:
        server += {"http": ":80", "https": ":443"}.get(scheme, "")
    return server.replace("[", "").replace("]", "")


def _is_postponed(error: BaseException) -> bool:
    """Return whether the service refused the call, or asked to repeat it later."""
    return is_refusal(error) or bool(retry_after(error))


async def _sleep(seconds: float) -> None:
    with waiting_for(current(), "the pause before the next attempt"):
        await asyncio.sleep(seconds)
