"""The router: a control plane of its own, and the proxy for everything else."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig, RouterConfig
from reward_loop.router.headers import RawHeader, find
from reward_loop.router.health import check_health
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Client, Proxy
from reward_loop.router.request import Receive, Scope, Send
from reward_loop.router.router_error import Refusal

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
        self._credentials = f"Bearer {config.api_key}".encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or the lifespan."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if not self._is_allowed(scope["path"], scope["headers"]):
            headers, body = Refusal(401, "an API key is needed, as a bearer token").render()
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            return await send({"type": "http.response.body", "body": body})
        if scope["path"] in _HEALTH_PATHS:
            return await self._say_health(scope, send)
        # A route of FastAPI costs several times what forwarding a request does, so it sees its own paths only.
        if scope["path"] in _CONTROL_PATHS:
            control = await asyncio.shield(self._control)
            return await control(scope, receive, send)
        return await self._proxy(scope, receive, send)

    def begin(self, client: Client) -> bool:
        """Serves a request in callbacks, if it may be forwarded at once; see :meth:`~.proxy.Proxy.begin`."""
        if client.path in _OWN_PATHS or (self._credentials and not self._is_allowed(client.path, client.headers)):
            return False
        return self._proxy.begin(client)

    def _is_allowed(self, path: str, headers: Sequence[RawHeader]) -> bool:
        if self._credentials is None or path in _HEALTH_PATHS:
            return True
        return hmac.compare_digest(find(headers, b"authorization") or b"", self._credentials)

    async def _say_health(self, scope: Scope, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        status, said = 200, b"ok"
        if scope["method"] not in ("GET", "HEAD"):
            status, said = 405, b"method not allowed"
            headers.append((b"allow", b"GET, HEAD"))
        elif scope["path"] != "/live" and not self._pool.usable:
            status, said = 503, b"unavailable"
            headers.append((b"retry-after", b"1"))
        body = b'{"status":"%b"}' % said
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

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
