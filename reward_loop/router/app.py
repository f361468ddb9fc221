"""The router: health endpoints, the control plane, and the proxy for all other paths."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from reward_loop.router.asgi import call_asgi
from reward_loop.router.backend import Backend
from reward_loop.router.client_request import ClientRequest
from reward_loop.router.config import BackendConfig, RouterConfig
from reward_loop.router.headers import find, is_looping
from reward_loop.router.health import check_health
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy
from reward_loop.router.router_error import LOOPING, Refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Router", "create_app"]

_HEALTH_PATHS = frozenset({"/health", "/live", "/ready"})
"""Paths for health checks of the router itself; they need no API key."""

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

_CONTROL_BODY_BYTES = 1024 * 1024
"""The longest request body of the control plane, in bytes: parsing it blocks the event loop."""


def create_app(backends: Iterable[str | BackendConfig], config: RouterConfig | None = None) -> Router:
    """Returns the router; an :class:`~reward_loop.router.http_server.HttpServer` serves it.

    ========================================= ==============================================================
    Endpoint                                  Effect
    ========================================= ==============================================================
    ``GET /health``, ``GET /ready``           200 while at least one server is usable, else 503
    ``GET /live``                             always 200
    ``GET /metrics``                          metrics for Prometheus
    ``GET /workers``                          lists the servers
    ``POST /workers``                         adds a server; the body is a `BackendConfig`
    ``DELETE /workers?url=``                  removes a server
    ``POST /workers/drain?url=``              stops new requests to a server
    ``POST /workers/sleep?url=``              stops new requests, and waits for those in flight to end
    ``POST /workers/resume?url=``             sends new requests to the server again
    ``POST /workers/mark_dead?url=&reason=``  reports that the server's process died, and may be restarted
                                              (also ``/workers/bury``)
    ``POST /workers/give_up?url=&reason=``    reports that the server's process will not be restarted
                                              (also ``/workers/retire``)
    all others                                forwarded to a server
    ========================================= ==============================================================

    The owner of the server processes calls ``sleep``, ``mark_dead`` and ``give_up``.

    Args:
        backends: the servers, or their URLs.
        config: options; by default, those of `RouterConfig()`.
    """
    configs = [BackendConfig(url=backend) if isinstance(backend, str) else backend for backend in backends]
    return Router(configs, config or RouterConfig())


class Router:
    """The router; see :func:`create_app`.

    Use it as an async context manager: between entry and exit, it checks the servers and can be called.
    """

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

    async def __aenter__(self) -> Self:
        self._pool = await BackendPool(self._backends, self._check, self._config).__aenter__()
        self._proxy = Proxy(self._pool, self._config)
        self._control = asyncio.create_task(asyncio.to_thread(self._make_control_plane))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._proxy.close()
        await self._control
        await self._pool.__aexit__(exc_type, exc, traceback)

    async def __call__(self, client: ClientRequest) -> None:
        """Serves one request."""
        if is_looping(client.headers, self._pool.identity):
            self._proxy.refuse(client, Refusal(508, LOOPING))
        elif not self._is_allowed(client):
            self._proxy.refuse(client, Refusal(401, "the API key is missing or wrong: send it as a bearer token"))
        elif client.path in _HEALTH_PATHS:
            self._answer_health(client)
        # FastAPI receives only the paths of the control plane: with a catch-all route of FastAPI, a router forwarded
        # 3,428 requests/s, with a plain ASGI app 9,387.
        elif client.path in _CONTROL_PATHS:
            await self._serve_control(client)
        else:
            await self._proxy(client)

    def _is_allowed(self, client: ClientRequest) -> bool:
        if self._credentials is None or client.path in _HEALTH_PATHS:
            return True
        # Names of authentication schemes are case-insensitive (RFC 9110, 11.1).
        scheme, _, token = (find(client.headers, b"authorization") or b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), self._credentials)

    async def _serve_control(self, client: ClientRequest) -> None:
        """Reads the body with the proxy's timeout, then calls the control plane."""
        bodies: list[bytes] = []

        async def read() -> None:
            bodies.append(await client.read_body(min(self._config.max_body_bytes, _CONTROL_BODY_BYTES)))

        await self._proxy.run(client, read())
        if bodies:  # Otherwise, the request was refused.
            await call_asgi(await asyncio.shield(self._control), client, bodies[0])

    def _answer_health(self, client: ClientRequest) -> None:
        if client.method not in ("GET", "HEAD"):
            self._proxy.refuse(client, Refusal(405, f"{client.path} takes GET and HEAD", allow="GET, HEAD"))
        elif client.path != "/live" and not self._pool.usable:
            client.refuse(Refusal(503, "no reward model server is usable", retry_after_s=1))
        else:
            body = b'{"status":"ok"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            client.answer(200, headers, body)

    def _make_control_plane(self) -> FastAPI:
        # Importing FastAPI took 2 s on a busy machine: this runs in a thread while the router already serves requests.
        from reward_loop.router.control import control_plane

        return control_plane(self._pool, self._proxy)
