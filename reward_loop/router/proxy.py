"""The router's data plane: forwards requests to servers and returns their answers, with unchanged bodies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

import orjson

from reward_loop.router.backend import Backend
from reward_loop.router.client_request import ClientRequest, WaitsFor
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import HOP_BY_HOP, RawHeader, named_by_connection, to_wire
from reward_loop.router.limited_log import LimitedLog
from reward_loop.router.limits import Gate, RetryBudget
from reward_loop.router.pool import BackendPool
from reward_loop.router.retries import Forwarder, Request
from reward_loop.router.router_error import Refusal
from reward_loop.router.routing import merged_models, route
from reward_loop.router.time_limit import TimeLimit

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Proxy:
    """Forwards every request to a server of the pool.

    Create it in a running event loop, and call :meth:`close` at the end.

    Errors of the proxy itself have the JSON format of vLLM's errors:

    ====== ==========================================================
    Status Reason
    ====== ==========================================================
    400    no server can answer the request
    404    no server has the model
    408    the body did not arrive before the deadline
    413    the body is too long
    429    all servers are cooling down after a 429 or 503
    501    the request asks for a WebSocket
    502    the last of `max_attempts` attempts lost its connection
    503    no server was available, or the waiting queue is full
    504    the server did not answer before the deadline
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
        self._pool = pool
        self._may_repeat = config.max_attempts > 1
        pool.on_frozen = self._move_requests
        self._key = pool.group().policy.key
        self._limit = TimeLimit(config.request_timeout_s)
        self._max_body_bytes = config.max_body_bytes
        # The proxy reads the whole body: it writes its own Content-Length, and drops "Expect: 100-continue".
        self._not_passed_on = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            self._not_passed_on |= {b"authorization"}

    def __call__(self, client: ClientRequest) -> Awaitable[None]:
        """Serves one request."""
        return self.run(client, self._serve(client))

    async def run(self, client: ClientRequest, work: Awaitable[None]) -> None:
        """Awaits `work` until the deadline of the request, and sends the error answer if it fails."""
        task = asyncio.current_task()
        assert task is not None
        self._limit.start(task)
        try:
            await work
        except Refusal as refusal:
            self.refuse(client, refusal)
        except asyncio.CancelledError:
            if not self._limit.is_exceeded(task) or task.uncancel() > 0:
                raise  # The client disconnected, or the router stops.
            self.refuse(client, self._late(client))
        finally:
            self._limit.stop(task)

    def refuse(self, client: ClientRequest, refusal: Refusal) -> None:
        """Logs an error, and sends it to the client."""
        self.log.refused_request(client.method, client.path, refusal)
        client.refuse(refusal)

    def close(self) -> None:
        """Stops the timer, and logs the summaries of suppressed messages."""
        self._limit.close()
        self.log.close()

    async def _serve(self, client: ClientRequest) -> None:
        headers = self._headers_for_servers(client.headers)
        if not self.gate.enter_at_once():
            await self.gate.enter()
        try:
            body = await client.read_body(self._max_body_bytes)
            pool, path = self._pool, client.path
            if pool.several_models and path == "/v1/models" and client.method == "GET":
                content = orjson.dumps(merged_models(pool))
                own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
                client.answer(200, own, content)
                return
            if body or client.method in _WITH_BODY:
                headers += b"content-length: %d\r\n" % len(body)
            key = self._key(client.headers, body)
            self.budget.earn()
            destination = route(pool, path, body)
            request = Request(client.method.encode(), client.target, headers, body, destination, key)
            await self._forwarder.forward(client, request)
        finally:
            self.gate.leave()

    def _late(self, client: ClientRequest) -> Refusal:
        """Returns the error for a request that has passed its deadline."""
        timeout = f"{self._limit.seconds:g} s"
        match client.waits_for:
            case WaitsFor.TURN:
                message = f"the request waited {timeout} in the queue: {self.gate.inside} requests are in flight"
                return Refusal(503, message, close=True)
            case WaitsFor.BODY:
                return Refusal(408, f"the body did not arrive within {timeout}", close=True)
            case WaitsFor.SERVER:
                return Refusal(503, f"no reward model server was available for {timeout}: {self._pool.describe()}")
            case url:
                return Refusal(504, f"{url} did not answer within {timeout}, the time limit of a request")

    def _move_requests(self, backend: Backend) -> None:
        """Retries the unanswered requests of a frozen server on other servers, as far as the retry budget allows.

        Requests beyond the budget stay with the frozen server, which may recover.
        """
        if self._may_repeat and self._pool.has_stand_in(backend):
            backend.upstream.break_off("the server is frozen: its health checks time out", self.budget.spend)

    def _headers_for_servers(self, headers: list[RawHeader]) -> bytes:
        """Returns the header lines that are forwarded to a server.

        Raises:
            Refusal: the body is too long, or the request asks for a WebSocket.
        """
        fields = dict(headers)
        without = self._not_passed_on
        if b"connection" in fields:
            without |= named_by_connection(headers)
        if int(fields.get(b"content-length", 0)) > self._max_body_bytes:
            raise Refusal(413, f"the body is longer than {self._max_body_bytes} bytes", close=True)
        if fields.get(b"upgrade", b"").lower() == b"websocket":
            raise Refusal(501, "the router does not forward WebSockets", close=True)
        return to_wire(headers, without)
