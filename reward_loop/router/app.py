"""The router's ASGI app: health endpoints, the control plane, and the proxy for all other paths."""

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

_OWN_PATHS = _HEALTH_PATHS | _CONTROL_PATHS
"""Requests with all other paths are forwarded to the servers."""


_CONTROL_BODY_BYTES = 1024 * 1024
"""The longest request body of the control plane, in bytes: parsing it blocks the event loop."""


def create_app(backends: Iterable[str | BackendConfig], config: RouterConfig | None = None) -> Router:
    """Returns the router's ASGI app.

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
    """The router's ASGI app; see :func:`create_app`."""

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
        """Serves one HTTP request, or the ASGI lifespan."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if is_looping(scope["headers"], self._pool.identity):
            return await self._refuse(scope, send, Refusal(508, LOOPING))
        if not self._is_allowed(scope["path"], scope["headers"]):
            return await self._refuse(scope, send, Refusal(401, "an API key is needed, as a bearer token"))
        if scope["path"] in _HEALTH_PATHS:
            return await self._answer_health(scope, send)
        # FastAPI receives only the paths of the control plane: with a catch-all route of FastAPI, a router forwarded
        # 3,428 requests/s, with a plain ASGI app 9,387.
        if scope["path"] in _CONTROL_PATHS:
            return await self._serve_control(scope, receive, send)
        return await self._proxy(scope, receive, send)

    def begin(self, client: Client) -> bool:
        """Forwards a request on the callback path if possible; see :meth:`~.proxy.Proxy.begin`.

        Returns:
            whether the request was accepted. If not, serve it with :meth:`__call__`.
        """
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
        """Reads the body with the proxy's timeout and limits, then calls the control plane."""
        exchange = Exchange(scope, receive, send, self._config.request_timeout_s, self._proxy.late)
        bodies: list[bytes] = []

        async def read() -> None:
            self._proxy.headers_for_servers(scope["headers"])  # Raises a Refusal if the headers are too long.
            bodies.append(await exchange.read_body(min(self._config.max_body_bytes, _CONTROL_BODY_BYTES)))

        await self._proxy.run(exchange, read())
        if not bodies:
            return  # The request was refused, or the client disconnected.

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
        # Importing FastAPI took 2 s on a busy machine: this runs in a thread while the router already serves requests.
        from reward_loop.router.control import control_plane

        return control_plane(self._pool, self._proxy)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with BackendPool(self._backends, self._check, self._config) as self._pool:
            self._proxy = Proxy(self._pool, self._config)
            self._control = asyncio.create_task(asyncio.to_thread(self._make_control_plane))
            await send({"type": "lifespan.startup.complete"})
            with contextlib.suppress(asyncio.CancelledError):  # After a second Ctrl-C, the event loop cancels this.
                await receive()
            self._proxy.close()
            await self._control
        await send({"type": "lifespan.shutdown.complete"})


async def _send_answer(send: Send, status: int, headers: list[RawHeader], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
