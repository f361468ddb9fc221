"""The router's data plane: forwards requests to servers and returns their answers, with unchanged bodies."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NamedTuple

import orjson

from reward_loop._util.retry_after import Backoff
from reward_loop._util.transient import RouterCode
from reward_loop.router.backend import Backend, Route
from reward_loop.router.config import RouterConfig
from reward_loop.router.http_client import (
    NO_BODY,
    BackendAnswer,
    BrokenError,
    ConnectError,
    MovedError,
    StaleError,
    UpstreamError,
)
from reward_loop.router.http_server import ClientRequest, WaitsFor
from reward_loop.router.messages import (
    HOP_BY_HOP,
    NO_WAIT,
    LimitedLog,
    RawHeader,
    Refusal,
    body_too_long,
    find,
    named_by_connection,
    to_wire,
)
from reward_loop.router.policies import Key, policy_for
from reward_loop.router.pool import BackendPool, UnknownModelError, model_of, route

logger = logging.getLogger(__name__)

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

_WORTH_A_RETRY = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses that are retried on another server."""

_MAX_ATTEMPTS = 4
"""The number of servers on which a request may fail before the failure is returned to the client."""

_MAX_BODY_BYTES = 64 * 1024 * 1024
"""Longer request bodies are answered with 413."""

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


class _Break(NamedTuple):
    """A server that may have died of a request; the times are those of `time.monotonic`."""

    backend: Backend
    began: float
    ended: float


class Proxy:
    """Forwards every request to a server of the pool, and passes the answer to the client.

    A request is retried only while no part of its answer has been sent to the client:

    ============================= ============================================================================
    Attempt ended with            Then
    ============================= ============================================================================
    429, 500, 502, 503, 504       retried up to `_MAX_ATTEMPTS` if another server is available;
                                  else the answer is passed on. A server that answers 429, 503 with
                                  ``Retry-After``, or 503 while it works on other requests is full, and stays in
                                  use: the client waits
    another status                the answer is passed on
    `StaleError`                  retried without a pause; not counted as a failure
    `ConnectError`                server taken out of use; retried, not counted in `_MAX_ATTEMPTS`
    `BrokenError`                 server taken out of use; retried up to `_MAX_ATTEMPTS`, then 502
    two of them, or a 500, and    422, which nobody repeats: the request may break servers
    two servers have died
    404 of a model                the servers are asked for their models; retried on one that has the model
    ============================= ============================================================================

    Errors of the proxy itself:

    ====== ==========================================================
    Status Reason
    ====== ==========================================================
    400    no server can answer the request
    404    no server has the model
    413    the body is too long
    422    two servers died while the request was in flight
    501    the request asks for a WebSocket
    502    the last of `_MAX_ATTEMPTS` attempts lost its connection
    503    no server was available, or none is up and the request has the header `NO_WAIT`
    504    the server did not answer before the deadline
    ====== ==========================================================
    """

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        self.log = LimitedLog(logger)
        self._pool = pool
        self._policy = policy_for(config.policy)
        # The proxy reads the whole body: it writes its own Content-Length, and drops "Expect: 100-continue".
        self._not_passed_on = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            # The client's key is for the router: a server must not learn it, and may have another.
            self._not_passed_on |= {b"authorization"}

    async def __call__(self, client: ClientRequest) -> None:
        """Forward one request.

        Raises:
            Refusal: see the table above; the router sends it to the client.
        """
        headers = self._headers_for_servers(client.headers)
        body = client.received_body(_MAX_BODY_BYTES)
        if body is None:
            body = await client.read_body(_MAX_BODY_BYTES)
        pool, path = self._pool, client.path
        if pool.several_models and path == "/v1/models" and client.method == "GET":
            models = [{"id": name, "object": "model", "owned_by": "reward_loop"} for name in sorted(pool.models)]
            client.answer_json(orjson.dumps({"object": "list", "data": models}))
            return
        if body or client.method in _WITH_BODY:
            headers += b"content-length: %d\r\n" % len(body)
        message = client.method.encode(), client.target, headers, body
        try:
            destination = route(pool, path, body)
        except UnknownModelError as unknown:
            await pool.ask_for_model(unknown.model)
            # Once more only: a name that is still unknown is the client's error.
            destination = route(pool, path, body)
        is_generative = destination.kind == "generative"
        key = self._policy.key(client.headers, body) if is_generative else None
        await self._forward(client, message, destination, key)

    def _headers_for_servers(self, headers: list[RawHeader]) -> bytes:
        """Return the header lines that are forwarded to a server.

        Raises:
            Refusal: the body is too long, or the request asks for a WebSocket.
        """
        fields = dict(headers)
        without = self._not_passed_on
        if b"connection" in fields:
            without |= named_by_connection(headers)
        if int(fields.get(b"content-length", 0)) > _MAX_BODY_BYTES:
            raise body_too_long(_MAX_BODY_BYTES)
        if fields.get(b"upgrade", b"").lower() == b"websocket":
            raise Refusal(501, "the router does not forward WebSockets", close=True)
        return to_wire(headers, without)

    async def _forward(
        self,
        client: ClientRequest,
        message: tuple[bytes, bytes, bytes, bytes],
        route: Route,
        key: Key | None,
    ) -> None:
        """Send a request to servers, and the answer to the client.

        Args:
            client: the client's request.
            message: the arguments of `Upstream.request`.
            route: which servers can answer it.
            key: the routing key; see `Policy.key`.
        """
        pool = self._pool
        failed: list[Backend] = []
        broken: list[_Break] = []
        attempts = 0
        asked_for_models = False
        pauses: Backoff | None = None
        while True:
            client.waits_for = WaitsFor.SERVER
            backend = pool.pick(route, key, failed)
            if backend is None:
                backend = await pool.acquire(route, key, failed, wait=find(client.headers, NO_WAIT) is None)
            backend.begin()
            client.waits_for = backend.url
            began = time.monotonic()
            status = 0
            failure: UpstreamError | None = None
            try:
                answer = await backend.upstream.request(*message)
                status = answer.status
                retry = False
                if status in _WORTH_A_RETRY:
                    attempts += 1
                    retry = self._may_retry(backend, answer, route, [*failed, backend], attempts)
                    if status == 500:  # which an engine that dies answers to all its requests
                        try:
                            await self._refuse_if_two_died(client, broken, backend, began)
                        except Refusal:
                            answer.close()
                            raise
                else:
                    if backend.failures or backend.outages:
                        pool.succeeded(backend)
                    if status == 404 and not asked_for_models:
                        asked_for_models = True
                        if other := await self._route_after_404(backend, route, message[3]):
                            answer.close()
                            route = other
                            continue
                answer.headers.append(backend.header)
                if not retry:
                    if answer.complete and answer.length is not None and status not in NO_BODY:
                        client.answer(status, answer.headers, answer.take())
                    else:
                        await _pass_on(client, answer)
                    return
                answer.close()
            except StaleError as error:
                # The server may only have closed an idle connection, so it stays in use. But it may also be dead, with
                # a socket that still accepts connections, so other servers are preferred.
                failure = error
            except (ConnectError, BrokenError) as error:
                failure = error
                backend.broken += 1
                pool.mark_unhealthy(backend, f"{type(error).__name__}: {error}")
                # Too late for a retry. `HttpServer` closes the connection: the client must see that a part is missing.
                if client.started:
                    self.log.warning(
                        backend, "%s: the connection to %s broke within the answer: %s", client.name, backend.url, error
                    )
                    return
                # A ConnectError does not count: the request was not sent, and the server is out of use now.
                attempts += isinstance(error, BrokenError)
            finally:
                backend.end(status, time.monotonic() - began)
            failed.append(backend)
            if isinstance(failure, BrokenError) and not isinstance(failure, MovedError):
                await self._refuse_if_two_died(client, broken, backend, began)
            if failure and attempts >= _MAX_ATTEMPTS:
                raise Refusal(502, f"{attempts} connections to servers broke: {pool.describe()}") from failure
            if not isinstance(failure, StaleError):
                backend.retries += 1
                if pauses is None:  # The first retry has no delay.
                    pauses = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
                else:
                    await asyncio.sleep(pauses.next_s())

    async def _refuse_if_two_died(
        self, client: ClientRequest, broken: list[_Break], backend: Backend, began: float
    ) -> None:
        """Record that a server may have died of the request; refuse it if this is the second one.

        Raises:
            Refusal: two servers have died.
        """
        # The socket of a dead server accepts connections until it is restarted, so one death may break several.
        same = next((one for one in broken if one.backend is backend and backend.healthy_at < one.ended), None)
        if same is not None:
            broken.remove(same)
            began = same.began
        broken.append(_Break(backend, began, time.monotonic()))
        if len(broken) < 2:  # without waiting for a health check: the request is repeated at once
            return
        died = [one.backend.url for one in broken if await self._pool.has_died(*one)]
        if len(died) > 1:
            message = f"{client.name} is not sent again: {' and '.join(died)} died while it was in flight"
            raise Refusal(422, message, code=RouterCode.REQUEST_BREAKS_SERVERS)

    async def _route_after_404(self, backend: Backend, route: Route, body: bytes) -> Route | None:
        """Return the route of a request whose model a server does not have, if other servers have it."""
        model = None if route.kind is None else model_of(body)
        if model is None:
            return None
        await self._pool.ask_for_model(model)
        other = Route(model, route.kind)
        group = self._pool.group(other)
        return other if self._pool.several_models and group.ready and backend not in group.members else None

    def _may_retry(
        self, backend: Backend, answer: BackendAnswer, route: Route, failed: list[Backend], attempts: int
    ) -> bool:
        """Record an error answer of a server; return whether to retry the request on another server."""
        asks_to_wait = find(answer.headers, b"retry-after") or find(answer.headers, b"retry-after-ms")
        is_full = answer.status == 429 or (answer.status == 503 and (asks_to_wait or backend.in_flight > 1))
        if not is_full:  # a full server works
            self._pool.failed(backend, f"status {answer.status}")
        return attempts < _MAX_ATTEMPTS and self._pool.has_other(route, failed)


async def _pass_on(client: ClientRequest, answer: BackendAnswer) -> None:
    """Send an answer to the client.

    Raises:
        BrokenError: the connection to the server broke before the end of the answer.
    """
    try:
        if not answer.complete and (answer.length is not None or client.version != "1.0"):
            client.start(answer.status, answer.headers)
            while part := await answer.read():
                await client.write(part)
            client.end()
            return
        # It is complete, or the client needs its length: HTTP/1.0 has no chunked encoding.
        parts = []
        while part := await answer.read():
            parts.append(part)
    finally:
        answer.close()
    headers, body = answer.headers, b"".join(parts)
    if answer.status in NO_BODY:
        # Such an answer has no body, whatever its Content-Length.
        headers = [header for header in headers if header[0] != b"content-length"]
    # The length of an answer to HEAD is that of the body which a GET would return, and is unknown here.
    elif answer.length is None and client.method != "HEAD":
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    client.answer(answer.status, headers, body)
