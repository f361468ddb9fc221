"""How a request gets its answer: from one server, or from another if that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import NamedTuple

from reward_loop._util.retry_after import retry_after_seconds
from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import find
from reward_loop.router.http_client import Answer, BrokenError, ConnectError, StaleError
from reward_loop.router.limited_log import LimitedLog
from reward_loop.router.limits import RetryBudget
from reward_loop.router.pool import AllCoolingDownError, BackendPool, NoBackendError
from reward_loop.router.request import Exchange
from reward_loop.router.router_error import Refusal
from reward_loop.router.routing import Route

__all__ = ["WORTH_A_RETRY", "Attempt", "Forwarder", "Request"]

WORTH_A_RETRY = frozenset({429, 500, 502, 503, 504})
"""Statuses for which another server is tried."""

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0

_PAUSE_S = 1.0
"""For a 429 that does not say how long to wait."""
_LONGEST_PAUSE_S = 60.0


class Request(NamedTuple):
    """What a server is sent, and which one."""

    method: bytes
    target: bytes
    """Path and query."""
    headers: bytes
    """Header lines, without ``Host``."""
    body: bytes
    destination: Route
    key: int
    """For the policy."""


class Attempt(NamedTuple):
    """A request that a server has been given."""

    backend: Backend
    began: float
    """The loop's time."""
    answer: Awaitable[Answer]


class Forwarder:
    """Passes requests to servers, and their answers to clients.

    A request that fails before its answer has begun is repeated on another server, or on the same one once it is well.
    If there is no other server, the answer of the first is passed on, errors included.

    Args:
        pool: the servers.
        budget: of retries.
        log: gets the answers that broke off.
        max_attempts: how many servers a request may fail on.
    """

    def __init__(self, pool: BackendPool, budget: RetryBudget, config: RouterConfig, log: LimitedLog) -> None:
        self._pool = pool
        self._budget = budget
        self._log = log
        self._max_attempts = config.max_attempts

    async def forward(self, exchange: Exchange, request: Request, attempt: Attempt | None = None) -> None:
        """Answers a request.

        Args:
            exchange: who asks.
            request: what is asked.
            attempt: if a server has been given it already.

        Raises:
            Refusal: there was no server, or it broke the connections to several.
        """
        pool = self._pool
        loop = asyncio.get_running_loop()
        failed: list[Backend] = []
        attempts = 0
        while True:
            if attempt is None:
                exchange.waits_for = None
                group = pool.group(*request.destination)
                backend = pool.pick(group, request.key, failed) or await self._wait(request, failed)
                backend.begin()
                attempt = Attempt(backend, loop.time(), backend.upstream.request(*request[:4]))
            backend, began = attempt.backend, attempt.began
            exchange.waits_for = backend.url
            status = 0
            try:
                answer = await attempt.answer
                status = answer.status
                if status in WORTH_A_RETRY:
                    attempts += 1
                    if not self._may_retry(backend, answer, request, [*failed, backend], attempts):
                        return await exchange.pass_on(answer)
                    answer.close()
                else:
                    if backend.failures or backend.state is not BackendState.UP:
                        pool.succeeded(backend)
                    return await exchange.pass_on(answer)
            except StaleError:
                # Not known to be a failure, so the server stays in use. But it may be dead, with a socket that still
                # accepts connections: another server comes first.
                failed.append(backend)
                attempt = None
                continue
            except (ConnectError, BrokenError) as error:
                backend.stats.broken += 1
                pool.mark_unhealthy(backend, f"{type(error).__name__}: {error}")
                if exchange.started:
                    self._log.warning(backend, "%s: the answer of %s broke off: %s", exchange.name, backend.url, error)
                    return None
                attempts += isinstance(error, BrokenError)
                if attempts >= self._max_attempts:
                    raise Refusal(502, f"the connection broke {attempts} times: {pool.describe()}") from error
            finally:
                backend.end(status, loop.time() - began)
            backend.stats.retries += 1
            failed.append(backend)
            attempt = None
            await self._back_off(exchange, len(failed))

    async def _wait(self, request: Request, failed: list[Backend]) -> Backend:
        try:
            return await self._pool.acquire(*request.destination, request.key, failed)
        except NoBackendError as error:
            raise Refusal(503, str(error)) from error
        except AllCoolingDownError as error:
            raise Refusal(429, str(error), retry_after_s=error.seconds) from error

    def _may_retry(
        self, backend: Backend, answer: Answer, request: Request, failed: list[Backend], attempts: int
    ) -> bool:
        """Takes note of a failure that a server has answered with; whether to try another one."""
        pause = find(answer.headers, b"retry-after")
        if answer.status == 429 or (answer.status == 503 and pause):
            self._pool.cool_down(backend, _pause(pause))
        else:
            self._pool.failed(backend, f"status {answer.status}")
        if attempts >= self._max_attempts:
            return False
        other = self._pool.pick(self._pool.group(*request.destination), 0, failed)
        return other is not None and self._budget.spend()

    async def _back_off(self, exchange: Exchange, failures: int) -> None:
        # The first time another server is tried at once.
        if failures > 1:
            longest = min(_FIRST_BACKOFF_S * 2.0 ** (failures - 2), _LONGEST_BACKOFF_S)
            await asyncio.sleep(min(longest * random.uniform(0.5, 1), max(0, exchange.time_left)))


def _pause(retry_after: bytes | None) -> float:
    """How long a server rests that has too much to do."""
    seconds = None if retry_after is None else retry_after_seconds(retry_after.decode("latin-1"))
    return _PAUSE_S if seconds is None else min(seconds, _LONGEST_PAUSE_S)
