"""The router's data plane: forwards requests to servers and returns their answers, with unchanged bodies."""

from __future__ import annotations

import logging

import orjson

from reward_loop.router.backend import Backend
from reward_loop.router.client_request import ClientRequest
from reward_loop.router.config import RouterConfig
from reward_loop.router.headers import HOP_BY_HOP, RawHeader, named_by_connection, to_wire
from reward_loop.router.limited_log import LimitedLog
from reward_loop.router.limits import Gate, RetryBudget
from reward_loop.router.policies import policy_for
from reward_loop.router.pool import BackendPool
from reward_loop.router.retries import Forwarder, Request
from reward_loop.router.router_error import Refusal
from reward_loop.router.routing import merged_models, route

__all__ = ["Proxy"]

logger = logging.getLogger(__name__)

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Proxy:
    """Forwards every request to a server of the pool.

    Errors of the proxy itself:

    ====== ==========================================================
    Status Reason
    ====== ==========================================================
    400    no server can answer the request
    404    no server has the model
    413    the body is too long
    429    all servers are cooling down after a 429 or 503
    501    the request asks for a WebSocket
    502    the last of `max_attempts` attempts lost its connection
    503    no server was available, or the waiting queue is full
    504    the server did not answer before the deadline
    ====== ==========================================================
    """

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        self.gate = Gate(config.max_in_flight, config.max_queue)
        self.budget = RetryBudget(config.retry_share)
        self.log = LimitedLog(logger)
        self._forwarder = Forwarder(pool, self.budget, config, self.log)
        self._pool = pool
        self._may_repeat = config.max_attempts > 1
        pool.on_frozen = self._move_requests
        self._key = policy_for(config).key
        self._max_body_bytes = config.max_body_bytes
        # The proxy reads the whole body: it writes its own Content-Length, and drops "Expect: 100-continue".
        self._not_passed_on = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
        if config.api_key or config.worker_api_key:
            self._not_passed_on |= {b"authorization"}

    async def __call__(self, client: ClientRequest) -> None:
        """Forwards one request.

        Raises:
            Refusal: see the table above; the router sends it to the client.
        """
        headers = self._headers_for_servers(client.headers)
        await self.gate.enter()
        try:
            body = await client.read_body(self._max_body_bytes)
            pool, path = self._pool, client.path
            if pool.several_models and path == "/v1/models" and client.method == "GET":
                client.answer_json(orjson.dumps(merged_models(pool)))
                return
            if body or client.method in _WITH_BODY:
                headers += b"content-length: %d\r\n" % len(body)
            key = self._key(client.headers, body)
            self.budget.earn()
            request = Request(client.method.encode(), client.target, headers, body)
            await self._forwarder.forward(client, request, route(pool, path, body), key)
        finally:
            self.gate.leave()

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
