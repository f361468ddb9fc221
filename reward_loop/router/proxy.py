"""The router's data plane: forwards requests to servers and returns their answers, with unchanged bodies.

A request takes one of two paths:

- Callback path (:meth:`Proxy.begin`, :class:`_Direct`): the body is complete and a server is free. The request has no
  asyncio task. A short, complete answer is written in the callback that received it.
- Task path (:meth:`Proxy.__call__`, :class:`~reward_loop.router.request.Exchange`): all other requests. A request on
  the callback path moves to a task (:meth:`Proxy.go_on`) if its answer is an error, is streamed, or has to be retried.

Invariants:

- A forwarded request is in `Proxy.watched` until it ends; one shared timer checks the deadlines of all of them.
- Each admitted request leaves the gate exactly once. When a request moves to a task, its place in the gate moves with
  it.
"""

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
"""Statuses that the callback path hands over to a task: retryable errors, and answers without a body."""

_SHORT_S = 4 * WATCH_AFTER_S
"""If the request timeout is shorter than this (in seconds), each request has its own timer: the shared timer runs only
every `WATCH_AFTER_S` seconds."""


class Client(Protocol):
    """A client's request and the callbacks that answer it; the argument of :meth:`Proxy.begin`."""

    method: str
    path: str
    target: bytes
    """Path and query, exactly as received."""
    headers: list[RawHeader]
    body: bytes
    on_leave: Callable[[], None] | None
    """Called when the client disconnects."""

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends a complete answer; `headers` include ``Content-Length``."""

    def go_on(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Starts a task in which an ASGI app serves the rest of the request."""


class Proxy:
    """An ASGI app that forwards every request to a server of the pool.

    Create it in a running event loop, and call :meth:`close` at the end.

    Any ASGI server can run it. A server protocol can also offer requests to :meth:`begin`, which serves most of them
    without a task and without ASGI messages.

    Errors of the proxy itself have the JSON format of vLLM's errors:

    ====== ==========================================================
    Status Reason
    ====== ==========================================================
    400    no server can answer the request
    404    no server has the model
    408    the body did not arrive before the deadline
    413    the body is too long
    429    all servers are cooling down after a 429 or 503
    431    the headers are too long
    501    the request asks for a WebSocket
    502    the last of `max_attempts` attempts lost its connection
    503    no server was available, or the waiting queue is full
    504    the server did not answer before the deadline
    508    the request has passed this router before
    ====== ==========================================================

    Args:
        pool: the servers.
        config: options; by default, those of `RouterConfig()`.
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
        # The proxy reads the whole body: it writes its own Content-Length, and drops "Expect: 100-continue".
        self._not_passed_on = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            self._not_passed_on |= {b"authorization"}
        self.watched: set[Exchange | _Direct] = set()
        """Forwarded requests that have not ended."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"the router forwards HTTP requests only, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._timeout_s, self.late)
        await self.run(exchange, self._serve(exchange))

    async def run(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Awaits `work`, and sends the error answer if it raises a `Refusal`.

        `work` is cancelled at the request's deadline, or when the client disconnects.
        """
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
        """Forwards a request with a complete body on the callback path.

        Returns:
            whether the request was accepted. If not, serve it with :meth:`__call__`.
        """
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
        """Cancels the requests on the callback path, and logs the summaries of suppressed messages."""
        for exchange in list(self.watched):
            if isinstance(exchange, _Direct):
                exchange.give_up()
        self.log.close()

    async def go_on(self, attempt: Attempt, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        """Continues a request of the callback path in a task. The request has already been admitted by the gate."""
        exchange = Exchange(scope, receive, send, self._timeout_s, self.late, attempt.began)
        try:
            await self.run(exchange, self._forward(exchange, request, attempt))
        finally:
            self.gate.leave()

    def late(self, exchange: Exchange | _Direct) -> Refusal:
        """Returns the error for a request that has passed its deadline."""
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
        """Retries the unanswered requests of a frozen server on other servers, as far as the retry budget allows.

        Requests beyond the budget stay with the frozen server, which may recover.
        """
        if self._may_repeat and self._pool.has_stand_in(backend):
            backend.upstream.break_off("the server is frozen: its health checks time out", self.budget.spend)

    def _watch(self, exchange: Exchange | _Direct) -> None:
        """Starts to enforce the deadline of a request; after `WATCH_AFTER_S`, also detects a client disconnect."""
        self.watched.add(exchange)
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(WATCH_AFTER_S, self._sweep)

    def _sweep(self) -> None:
        now = self.loop.time()
        for exchange in list(self.watched):
            exchange.check(now)
        self._sweeping = self.loop.call_later(WATCH_AFTER_S, self._sweep) if self.watched else None

    def headers_for_servers(self, headers: list[RawHeader]) -> bytes:
        """Returns the header lines that are forwarded to a server.

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
    """A request on the callback path: it is sent in the callback that received it, and has no task.

    It implements `Arrival`, so the connection calls `set_result` or `set_exception`. A complete, successful answer is
    written to the client in that callback. In all other cases the request moves to a task.
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
        """The URL of the server that the request was sent to."""
        return self._backend.url

    def done(self) -> bool:
        """Returns ``False``: the answer is always needed, as cancelling closes the connection."""
        return False

    def set_result(self, answer: Answer, /) -> None:
        """Handles the server's answer: writes it to the client, or moves the request to a task."""
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
        """Handles a failed connection: moves the request to a task, which tries other servers."""
        future: asyncio.Future[Answer] = self._proxy.loop.create_future()
        future.set_exception(error)
        self._go_on(future)

    def give_up(self) -> None:
        """Cancels the request: closes the connection to the server."""
        self._sending.close()
        self._end()

    def check(self, now: float) -> None:
        """Cancels the request and answers with an error if the deadline has passed."""
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
