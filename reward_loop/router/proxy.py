"""The router's data plane: passes requests to servers and their answers back, bytes untouched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import orjson

from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import HOP_BY_HOP, RawHeader, is_looping, named_by_connection, to_wire
from reward_loop.router.http_client import NO_BODY, Answer, Sending, UpstreamError
from reward_loop.router.limited_log import LimitedLog
from reward_loop.router.limits import Gate, RetryBudget
from reward_loop.router.pool import BackendPool
from reward_loop.router.request import WATCH_AFTER_S, ClientLeftError, Exchange, Receive, Scope, Send
from reward_loop.router.retries import WORTH_A_RETRY, Attempt, Forwarder, Request
from reward_loop.router.router_error import LOOPING, Refusal
from reward_loop.router.routing import merged_models, route

__all__ = ["Client", "Proxy"]

logger = logging.getLogger(__name__)

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})

_SPECIAL = WORTH_A_RETRY | NO_BODY
"""Statuses of answers that are not simply passed on."""

_SHORT_S = 4 * WATCH_AFTER_S
"""Shorter deadlines need a timer for each request."""


class Client(Protocol):
    """Who waits for the answer to a request, in callbacks: see :meth:`Proxy.begin`."""

    method: str
    path: str
    target: bytes
    """Path and query, as they came."""
    headers: list[RawHeader]
    body: bytes
    on_leave: Callable[[], None] | None
    """Called when it is gone."""

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends it a whole answer, whose headers say how long it is."""

    def go_on(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Leaves the rest to an ASGI app, in a task."""


class Proxy:
    """An ASGI app that forwards every request to a server of the pool.

    To be made in a running event loop; its owner calls :meth:`close`.

    It needs nothing but ASGI. A server protocol that can do more also offers it requests by :meth:`begin`: most need
    neither a task of their own nor the messages of ASGI, which together cost more than all the rest.

    The proxy's own answers have vLLM's error shape: 400 and 404 for what no server can answer, 408 when the body did
    not come in time, 413 and 431 for what is too long, 429 when all servers have asked for a pause, 502 when the
    request has broken several servers, 503 when no server was available or too many requests wait, 504 when a server
    did not answer in time, 508 when the request has passed this router before.
    """

    def __init__(self, pool: BackendPool, config: RouterConfig | None = None) -> None:
        config = config or RouterConfig()
        self.gate = Gate(config.max_in_flight, config.max_queue)
        self.budget = RetryBudget(config.retry_share)
        self.log = LimitedLog(logger)
        self._forwarder = Forwarder(pool, self.budget, config, self.log)
        self.loop = asyncio.get_running_loop()
        self._pool = pool
        self._may_repeat = config.max_attempts > 1
        pool.on_frozen = self._move_requests
        self._key = pool.group().policy.key
        self._timeout_s = config.request_timeout_s
        self._max_body_bytes = config.max_body_bytes
        self._max_header_bytes = config.max_header_bytes
        # The length is known anew, and there is nothing more to expect, once the body is complete.
        self._not_passed_on = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            self._not_passed_on |= {b"authorization"}
        self.watched: set[Exchange | _Direct] = set()
        """The requests that have been forwarded."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"the router forwards HTTP requests only, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._timeout_s, self.late)
        await self.run(exchange, self._serve(exchange))

    async def run(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Awaits what serves a request, until its deadline, or until its client leaves; answers refusals."""
        try:
            await work
        except Refusal as refusal:
            await self._refuse(exchange, refusal)
        except ClientLeftError:
            pass
        except asyncio.CancelledError:
            reason = exchange.broken_off
            task = asyncio.current_task()
            if reason is None or task is None or task.uncancel() > 0:
                raise
            if isinstance(reason, Refusal):
                await self._refuse(exchange, reason)
        finally:
            exchange.end()

    async def _serve(self, exchange: Exchange) -> None:
        if not self.gate.has_room:
            exchange.set_timer()
        await self.gate.enter()
        try:
            scope = exchange.scope
            headers = self.headers_for_servers(scope["headers"])
            body = await exchange.read_body(self._max_body_bytes)
            pool = self._pool
            if pool.several_models and scope["path"] == "/v1/models" and scope["method"] == "GET":
                content = orjson.dumps(merged_models(pool))
                own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
                return await exchange.answer(200, own, content)
            path = scope["path"]
            target = scope.get("raw_path") or path.encode()
            if scope["query_string"]:
                target = b"%b?%b" % (target, scope["query_string"])
            key = self._key(scope["headers"], body)
            request = self._request(scope["method"], path, target, headers, body, key)
            self.budget.earn()
            await self._forward(exchange, request)
        finally:
            self.gate.leave()

    async def _forward(self, exchange: Exchange, request: Request, attempt: Attempt | None = None) -> None:
        if self._timeout_s < _SHORT_S:
            exchange.set_timer()
        self._watch(exchange)
        try:
            await self._forwarder.forward(exchange, request, attempt)
        finally:
            self.watched.discard(exchange)

    def begin(self, client: Client) -> bool:
        """Forwards a request whose body is there, if nothing stands in its way; else it is one for :meth:`__call__`."""
        path, body = client.path, client.body
        if len(body) > self._max_body_bytes or self._timeout_s < _SHORT_S or path == "/v1/models":
            return False
        try:
            headers = self.headers_for_servers(client.headers)
            key = self._key(client.headers, body)
            request = self._request(client.method, path, client.target, headers, body, key)
        except Refusal:
            return False
        pool = self._pool
        backend = pool.pick(pool.group(*request.destination), request.key)
        if not backend or not self.gate.enter_at_once():
            return False
        self.budget.earn()
        self._watch(_Direct(self, client, request, backend, self._timeout_s))
        return True

    def close(self) -> None:
        """Cancels the requests that have no task, and logs what has only been counted."""
        for exchange in list(self.watched):
            if isinstance(exchange, _Direct):
                exchange.give_up()
        self.log.close()

    async def go_on(self, attempt: Attempt, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves, in a task, a request that began without one, and has a place inside the gate."""
        exchange = Exchange(scope, receive, send, self._timeout_s, self.late, attempt.began)
        try:
            await self.run(exchange, self._forward(exchange, request, attempt))
        finally:
            self.gate.leave()

    def late(self, exchange: Exchange | _Direct) -> Refusal:
        """What a request gets whose time is over."""
        timeout = f"{self._timeout_s:g} s"
        if exchange.waits_for:
            return Refusal(504, f"{exchange.waits_for} did not answer within the {timeout} that a request may take")
        if isinstance(exchange, Exchange) and exchange.reading:
            return Refusal(408, f"the body did not come within the {timeout} that a request may take", close=True)
        if exchange not in self.watched:
            return Refusal(
                503, f"it was not its turn within {timeout}: {self.gate.inside} requests are in work", close=True
            )
        return Refusal(503, f"no reward model server was available for {timeout}: {self._pool.describe()}", close=True)

    def _move_requests(self, backend: Backend) -> None:
        """Tries requests that a frozen server has not begun to answer on another server, as far as the budget goes.

        The other requests stay: the server may continue.
        """
        if self._may_repeat and self._pool.has_stand_in(backend):
            backend.upstream.break_off("the server is frozen: its health checks time out", self.budget.spend)

    def _watch(self, exchange: Exchange | _Direct) -> None:
        """From now on its deadline holds, and a while later its client's leaving is noticed."""
        # One timer for all: one for each would be a good part of what a quick request costs.
        self.watched.add(exchange)
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(WATCH_AFTER_S, self._sweep)

    def _sweep(self) -> None:
        now = self.loop.time()
        for exchange in list(self.watched):
            exchange.check(now)
        self._sweeping = self.loop.call_later(WATCH_AFTER_S, self._sweep) if self.watched else None

    def headers_for_servers(self, headers: list[RawHeader]) -> bytes:
        """The header lines that a server gets of a request.

        Raises:
            Refusal: the headers or the body are too long, the request has passed this router before, or it asks for a
                WebSocket.
        """
        fields = dict(headers)
        if b"via" in fields and is_looping(headers, self._pool.identity):
            raise Refusal(508, LOOPING)
        without = self._not_passed_on
        if b"connection" in fields:
            without |= named_by_connection(headers)
        passed_on = to_wire(headers, without)
        if len(passed_on) > self._max_header_bytes:
            raise Refusal(431, f"the headers are longer than {self._max_header_bytes} bytes", close=True)
        if int(fields.get(b"content-length", 0)) > self._max_body_bytes:
            raise Refusal(413, f"the body is longer than {self._max_body_bytes} bytes", close=True)
        if fields.get(b"upgrade", b"").lower() == b"websocket":
            raise Refusal(501, "the router does not forward WebSockets", close=True)
        return passed_on

    def _request(self, method: str, path: str, target: bytes, headers: bytes, body: bytes, key: int) -> Request:
        if body or method in _WITH_BODY:
            headers += b"content-length: %d\r\n" % len(body)
        return Request(method.encode(), target, headers, body, route(self._pool, path, body), key)

    async def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        self.log.refused_request(exchange.scope["method"], exchange.scope["path"], refusal)
        await exchange.refuse(refusal)


class _Direct:
    """A request that was given to a server within the callback that brought it, and has no task.

    It is told of its answer. If that is whole and no error, the client gets it in the same callback; whatever else
    comes is left to a task, which goes on from there.
    """

    __slots__ = ("_backend", "_began", "_client", "_deadline", "_proxy", "_request", "_sending")

    def __init__(self, proxy: Proxy, client: Client, request: Request, backend: Backend, timeout_s: float) -> None:
        self._proxy = proxy
        self._client = client
        self._request = request
        self._backend = backend
        self._began = began = proxy.loop.time()
        self._deadline = began + timeout_s
        backend.begin()
        client.on_leave = self.give_up
        method, target, headers, body, _, _ = request
        self._sending: Sending = backend.upstream.send(self, method, target, headers, body)

    @property
    def waits_for(self) -> str:
        """The URL of the server that has it."""
        return self._backend.url

    def done(self) -> bool:
        """Whether it does not want to know of its answer."""
        return False

    def set_result(self, answer: Answer, /) -> None:
        """The server has answered."""
        backend, status = self._backend, answer.status
        if (
            answer.complete
            and answer.length is not None
            and status not in _SPECIAL
            and backend.state is BackendState.UP
            and not backend.failures
        ):
            self._end(status)
            self._client.answer(status, answer.headers, answer.take())
        else:
            future: asyncio.Future[Answer] = self._proxy.loop.create_future()
            future.set_result(answer)
            self._go_on(future)

    def set_exception(self, error: UpstreamError, /) -> None:
        """There was no connection, or it broke: a task tries other servers."""
        future: asyncio.Future[Answer] = self._proxy.loop.create_future()
        future.set_exception(error)
        self._go_on(future)

    def give_up(self) -> None:
        """Takes it back from the server."""
        self._sending.close()
        self._end()

    def check(self, now: float) -> None:
        """Ends it if it is late."""
        if now >= self._deadline:
            self.give_up()
            refusal = self._proxy.late(self)
            self._proxy.log.refused_request(self._client.method, self._client.path, refusal)
            self._client.answer(refusal.status, *refusal.render())

    def _go_on(self, answer: Awaitable[Answer]) -> None:
        self._leave()
        attempt = Attempt(self._backend, self._began, answer)
        self._client.go_on(partial(self._proxy.go_on, attempt, self._request))

    def _end(self, status: int = 0) -> None:
        self._leave()
        self._backend.end(status, self._proxy.loop.time() - self._began)
        self._proxy.gate.leave()

    def _leave(self) -> None:
        self._client.on_leave = None
        self._proxy.watched.discard(self)
