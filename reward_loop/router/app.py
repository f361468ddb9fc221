"""The router: a control plane of its own, and the proxy for everything else."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig, RouterConfig
from reward_loop.router.headers import RawHeader, find, is_looping
from reward_loop.router.health import check_health
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Client, Proxy
from reward_loop.router.request import Exchange, Receive, Scope, Send
from reward_loop.router.router_error import LOOPING, Refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Router", "create_app"]

_HEALTH_PATHS = frozenset({"/health", "/live", "/ready"})
"""For those who ask whether the router lives; they need no key."""

_CONTROL_PATHS = frozenset(
    {
        "/metrics",
        "/workers",
        "/workers/mark_dead",
        "/workers/bury",
        "/workers/give_up",
        "/workers/retire",
        "/workers/drain",
        "/workers/sleep",
        "/workers/resume",
    }
)

_OWN_PATHS = _HEALTH_PATHS | _CONTROL_PATHS
"""All other paths belong to the servers."""


_CONTROL_BODY_BYTES = 1024 * 1024
"""Bodies of the control plane are parsed in one go, and all other requests wait meanwhile."""


def create_app(backends: Iterable[str | BackendConfig], config: RouterConfig | None = None) -> Router:
    """The router's ASGI app.

    ``GET /health`` and ``GET /ready`` are 200 while at least one server is usable, else 503; ``GET /live`` is 200
    in any case; ``GET /metrics`` is for
    Prometheus. ``GET``, ``POST`` and ``DELETE`` of ``/workers`` list, add and remove servers; ``POST /workers/drain``
    and ``/workers/resume`` stop and resume new requests to one.
    ``POST /workers/mark_dead`` (also ``/workers/bury``) and ``/workers/give_up`` (also ``/workers/retire``), with
    ``url`` and ``reason`` in the query, are for the owner of the servers' processes: the first reports that a process
    died and may be restarted, the second that it will not be. All other requests go to a server.

    Args:
        backends: the servers, or their URLs.
        config: options.
    """
    configs = [BackendConfig(url=backend) if isinstance(backend, str) else backend for backend in backends]
    return Router(configs, config or RouterConfig())


class Router:
    """An ASGI app; see :func:`create_app`."""

    def __init__(
        self,
        backends: list[BackendConfig],
        config: RouterConfig,
        check: Callable[[Backend], Awaitable[None]] = check_health,
    ) -> None:
        self._backends = backends
        self._config = config
        self._check = check
        self._pool: BackendPool
        self._proxy: Proxy
        self._control: asyncio.Task[FastAPI]
        self._credentials = config.api_key.encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or the lifespan."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if is_looping(scope["headers"], self._pool.identity):
            return await self._refuse(scope, send, Refusal(508, LOOPING))
        if not self._is_allowed(scope["path"], scope["headers"]):
            return await self._refuse(scope, send, Refusal(401, "an API key is needed, as a bearer token"))
        if scope["path"] in _HEALTH_PATHS:
            return await self._answer_health(scope, send)
        # A route of FastAPI costs several times what forwarding a request does, so it sees its own paths only.
        if scope["path"] in _CONTROL_PATHS:
            return await self._serve_control(scope, receive, send)
        return await self._proxy(scope, receive, send)

    def begin(self, client: Client) -> bool:
        """Serves a request in callbacks, if it may be forwarded at once; see :meth:`~.proxy.Proxy.begin`."""
        if client.path in _OWN_PATHS or (self._credentials and not self._is_allowed(client.path, client.headers)):
            return False
        return self._proxy.begin(client)

    def _is_allowed(self, path: str, headers: Sequence[RawHeader]) -> bool:
        if self._credentials is None or path in _HEALTH_PATHS:
            return True
        # Names of authentication schemes are case-insensitive (RFC 9110, 11.1).
        scheme, _, token = (find(headers, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), self._credentials)

    async def _serve_control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads a request's body, within the limits that all requests have, and leaves it to the control plane."""
        exchange = Exchange(scope, receive, send, self._config.request_timeout_s, self._proxy.late)
        bodies: list[bytes] = []

        async def read() -> None:
            self._proxy.headers_for_servers(scope["headers"])  # Raises if they are too long.
            bodies.append(await exchange.read_body(min(self._config.max_body_bytes, _CONTROL_BODY_BYTES)))

        await self._proxy.run(exchange, read())
        if not bodies:
            return  # It was refused, or the client left.

        async def receive_body() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

        control = await asyncio.shield(self._control)
        await control(scope, receive_body, send)

    async def _answer_health(self, scope: Scope, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            refusal = Refusal(405, f"{scope['path']} takes GET and HEAD", allow="GET, HEAD")
            await self._refuse(scope, send, refusal)
        elif scope["path"] != "/live" and not self._pool.usable:
            await _send_answer(send, 503, *Refusal(503, "no reward model server is in use", retry_after_s=1).render())
        else:
            body = b'{"status":"ok"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await _send_answer(send, 200, headers, body)

    async def _refuse(self, scope: Scope, send: Send, refusal: Refusal) -> None:
        self._proxy.log.refused_request(scope["method"], scope["path"], refusal)
        await _send_answer(send, refusal.status, *refusal.render())

    def _make_control_plane(self) -> FastAPI:
        # FastAPI takes long to import: the router is ready without it.
        from reward_loop.router.control import control_plane

        return control_plane(self._pool, self._proxy)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with BackendPool(self._backends, self._check, self._config) as self._pool:
            self._proxy = Proxy(self._pool, self._config)
            self._control = asyncio.create_task(asyncio.to_thread(self._make_control_plane))
            await send({"type": "lifespan.startup.complete"})
            with contextlib.suppress(asyncio.CancelledError):  # At a second Ctrl-C, uvicorn waits for nothing.
                await receive()
            self._proxy.close()
            await self._control
        await send({"type": "lifespan.shutdown.complete"})


async def _send_answer(send: Send, status: int, headers: list[RawHeader], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
