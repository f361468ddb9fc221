"""The router's data plane: passes requests to workers and their answers back, bytes untouched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import aiohttp
import anyio
import orjson
from multidict import CIMultiDict
from yarl import URL

from reward_loop.router.disconnect import stop_on_disconnect
from reward_loop.router.pool import NoWorkerError, Worker, WorkerPool

__all__ = ["Proxy", "client_session"]

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers about one connection only (RFC 9110, 7.6.1)."""

_SET_BY_CLIENT = frozenset({b"host", b"content-length", b"expect"})
"""Request headers that the HTTP client writes anew: the body is complete when it is passed on."""

_MAX_BROKEN_ATTEMPTS = 4
"""A request that took down this many workers is taken for the cause."""


def client_session() -> aiohttp.ClientSession:
    """The session that a proxy and its pool share: no cap on connections, and nothing added or decoded."""
    return aiohttp.ClientSession(
        # Less than the 5 s after which a uvicorn server closes an idle connection, perhaps just as it is used again.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Proxy:
    """An ASGI app that forwards every request to a worker of the pool.

    An attempt that fails before the worker's answer has begun is repeated on the next worker, or on the same one once
    it is back. Whatever a worker answers is passed on, errors included.

    The proxy's own answers have vLLM's error shape: 502 when the request has broken several workers, 503 when no worker
    was to be had, 504 when a worker did not answer in time.

    Args:
        pool: the workers.
        session: see :func:`client_session`.
        timeout_s: seconds from the arrival of a request to the end of its answer.
    """

    def __init__(self, pool: WorkerPool, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._pool = pool
        self._session = session
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            raise NotImplementedError(f"the router forwards HTTP requests only, not {scope['type']}")
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        body = await _read(receive)
        if body is not None:
            exchange = _Exchange(scope, send)
            await stop_on_disconnect(receive, lambda: self._forward_until(deadline, exchange, body))

    async def _forward_until(self, deadline: float, exchange: _Exchange, body: bytes) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._forward(exchange, body)
        except TimeoutError:
            await exchange.fail(*self._late(exchange))

    async def _forward(self, exchange: _Exchange, body: bytes) -> None:
        broken = 0
        while True:
            exchange.worker = None
            try:
                worker = exchange.worker = await self._pool.acquire()
            except NoWorkerError as error:
                return await exchange.fail(503, str(error))
            with anyio.CancelScope() as attempt:
                worker.attempts.add(attempt)
                try:
                    return await self._attempt(exchange, worker, attempt, body)
                except aiohttp.ClientError as error:
                    self._pool.eject(worker, f"{type(error).__name__}: {error}")
                    if exchange.started:
                        logger.warning("%s %s: the answer of %s broke off: %s", *exchange.names, worker.url, error)
                        return None
                    broken += not isinstance(error, aiohttp.ClientConnectorError)
                finally:
                    worker.attempts.discard(attempt)
            broken += attempt.cancelled_caught
            if broken >= _MAX_BROKEN_ATTEMPTS:
                return await exchange.fail(502, f"the connection broke {broken} times: {self._pool.describe()}")

    async def _attempt(self, exchange: _Exchange, worker: Worker, attempt: anyio.CancelScope, body: bytes) -> None:
        async with self._session.request(
            exchange.scope["method"],
            URL(worker.url + exchange.target, encoded=True),
            headers=exchange.headers,
            data=body or None,
            allow_redirects=False,
        ) as response:
            # With a known length it is awaited whole: it can still be asked for again if it breaks off.
            if response.content_length is not None:
                content = await response.read()
                worker.attempts.discard(attempt)
                await exchange.start(response)
                await exchange.send_body(content)
                return
            worker.attempts.discard(attempt)
            await exchange.start(response)
            async for chunk in response.content.iter_any():
                await exchange.send_body(chunk, more=True)
            await exchange.send_body(b"")

    def _late(self, exchange: _Exchange) -> tuple[int, str]:
        if exchange.worker is None:
            return 503, f"no reward model server was available for {self._timeout_s:g} s: {self._pool.describe()}"
        return 504, f"{exchange.worker.url} did not answer within the {self._timeout_s:g} s that a request may take"


class _Exchange:
    """One request, and how far its answer has come."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.scope = scope
        self.worker: Worker | None = None
        self.started = False
        self._send = send
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        # The client writes what it is given as UTF-8.
        self.target = (raw_path + b"?" + query if query else raw_path).decode(errors="replace")
        self.headers = CIMultiDict(
            (name.decode(errors="replace"), value.decode(errors="replace"))
            for name, value in _end_to_end(scope["headers"])
            if name not in _SET_BY_CLIENT
        )

    @property
    def names(self) -> tuple[str, str]:
        return self.scope["method"], self.target

    async def start(self, response: aiohttp.ClientResponse) -> None:
        self.started = True
        headers = [(name.lower(), value) for name, value in response.raw_headers]
        await self._send(
            {"type": "http.response.start", "status": response.status, "headers": list(_end_to_end(headers))}
        )

    async def send_body(self, content: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": more})

    async def fail(self, status: int, message: str) -> None:
        """Answers with an error of the router's own, unless an answer has begun; that one just breaks off."""
        logger.warning("%s %s: %d, %s", *self.names, status, message)
        if self.started:
            return
        error = {"message": message, "type": "RouterError", "param": None, "code": status}
        content = orjson.dumps({"error": error})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send_body(content)


async def _read(receive: Receive) -> bytes | None:
    """The whole body of a request, or ``None`` if the client left before its end."""
    chunks = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def _end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers that are not about this connection; names are in lower case."""
    headers = list(headers)
    named = {option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]
