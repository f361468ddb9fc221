"""Forwards a request to a server, and retries it on other servers."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from reward_loop._util.retry_after import retry_after_seconds
from reward_loop.router.backend import Backend, BackendState, Route
from reward_loop.router.client_request import ClientRequest, WaitsFor
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import BACKEND, find
from reward_loop.router.http_connection import NO_BODY, Answer, BrokenError, ConnectError, StaleError
from reward_loop.router.limited_log import LimitedLog
from reward_loop.router.limits import RetryBudget
from reward_loop.router.pool import BackendPool
from reward_loop.router.router_error import Refusal

__all__ = ["WORTH_A_RETRY", "Forwarder", "Request"]

WORTH_A_RETRY = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses that are retried on another server."""

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0

_PAUSE_S = 1.0
"""The cool-down after a 429 without a valid ``Retry-After``, in seconds."""
_LONGEST_PAUSE_S = 60.0


class Request(NamedTuple):
    """A request to forward."""

    method: bytes
    target: bytes
    """The path and the query, as in the request line."""
    headers: bytes
    """Header lines, without ``Host``."""
    body: bytes


class Forwarder:
    """Forwards requests to servers, and passes the answers to the clients.

    A request is retried only while no part of its answer has been sent to the client:

    ============================= ============================================================================
    Attempt ended with            Then
    ============================= ============================================================================
    429, 500, 502, 503, 504       retried if another server is available and the retry budget allows it;
                                  else the answer is passed on
    another status                the answer is passed on
    `StaleError`                  retried without a pause; not counted as a failure
    `ConnectError`                server taken out of use; retried, not counted in `max_attempts`
    `BrokenError`                 server taken out of use; retried up to `max_attempts`, then 502
    ============================= ============================================================================

    Args:
        pool: the servers.
        budget: the retry budget.
        config: `max_attempts` is how many times a request may fail.
        log: the log for answers that broke off.
    """

    def __init__(self, pool: BackendPool, budget: RetryBudget, config: RouterConfig, log: LimitedLog) -> None:
        self._pool = pool
        self._budget = budget
        self._log = log
        self._max_attempts = config.max_attempts

    async def forward(self, client: ClientRequest, request: Request, route: Route, key: int) -> None:
        """Forwards a request and sends the answer to the client.

        Args:
            client: the client's request.
            request: the request to forward.
            route: which servers can answer it.
            key: the routing key; see `Policy.key`.

        Raises:
            Refusal: no server was available, or the last of `max_attempts` attempts lost its connection.
        """
        pool = self._pool
        loop = asyncio.get_running_loop()
        failed: list[Backend] = []
        attempts = 0
        while True:
            client.waits_for = WaitsFor.SERVER
            backend = await pool.acquire(route, key, failed)
            backend.begin()
            client.waits_for = backend.url
            began = loop.time()
            status = 0
            try:
                answer = await backend.upstream.request(*request)
                status = answer.status
                if status in WORTH_A_RETRY:
                    attempts += 1
                    retry = self._may_retry(backend, answer, route, [*failed, backend], attempts)
                else:
                    retry = False
                    if backend.failures or backend.state is not BackendState.UP:
                        pool.succeeded(backend)
                answer.headers.append((BACKEND, backend.url.encode()))
                if retry:
                    answer.close()
                elif answer.complete:
                    return _answer(client, answer, answer.take())
                else:
                    return await _stream(client, answer)
            except StaleError:
                # The server may only have closed an idle connection, so it stays in use. But it may also be dead, with
                # a socket that still accepts connections, so other servers are preferred.
                failed.append(backend)
                continue
            except (ConnectError, BrokenError) as error:
                backend.stats.broken += 1
                pool.mark_unhealthy(backend, f"{type(error).__name__}: {error}")
                if client.started:
                    self._log.warning(
                        backend, "%s: the connection to %s broke within the answer: %s", client.name, backend.url, error
                    )
                    return None
                attempts += isinstance(error, BrokenError)
                if attempts >= self._max_attempts:
                    raise Refusal(502, f"{attempts} connections to servers broke: {pool.describe()}") from error
            finally:
                backend.end(status, loop.time() - began)
            backend.stats.retries += 1
            failed.append(backend)
            await _back_off(len(failed))

    def _may_retry(self, backend: Backend, answer: Answer, route: Route, failed: list[Backend], attempts: int) -> bool:
        """Records an error answer of a server; returns whether to retry the request on another server."""
        pause = find(answer.headers, b"retry-after")
        if answer.status == 429 or (answer.status == 503 and pause):
            self._pool.cool_down(backend, _pause(pause))
        else:
            self._pool.failed(backend, f"status {answer.status}")
        return attempts < self._max_attempts and self._pool.has_other(route, failed) and self._budget.spend()


async def _back_off(failures: int) -> None:
    # The first retry has no delay.
    if failures > 1:
        longest = min(_FIRST_BACKOFF_S * 2.0 ** (failures - 2), _LONGEST_BACKOFF_S)
        await asyncio.sleep(longest * random.uniform(0.5, 1))


def _answer(client: ClientRequest, answer: Answer, body: bytes) -> None:
    """Sends a complete answer to the client."""
    headers = answer.headers
    if answer.status in NO_BODY:
        # Such an answer has no body, whatever its Content-Length.
        headers = [header for header in headers if header[0] != b"content-length"]
    elif answer.length is None and client.method != "HEAD":
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    client.answer(answer.status, headers, body)


async def _stream(client: ClientRequest, answer: Answer) -> None:
    """Sends an answer that is not complete yet.

    Raises:
        BrokenError: the connection to the server broke before the end of the answer.
    """
    try:
        if answer.length is None and client.version == "1.0":
            # HTTP/1.0 has no chunked encoding: wait for the whole body to know its length.
            parts = []
            while part := await answer.read():
                parts.append(part)
            _answer(client, answer, b"".join(parts))
        else:
            client.start(answer.status, answer.headers)
            while part := await answer.read():
                await client.write(part)
            client.end()
    finally:
        answer.close()


def _pause(retry_after: bytes | None) -> float:
    """Returns the cool-down of an overloaded server, in seconds."""
    seconds = None if retry_after is None else retry_after_seconds(retry_after.decode("latin-1"))
    return _PAUSE_S if seconds is None else min(seconds, _LONGEST_PAUSE_S)
