"""The router: a control plane of its own, and the proxy for everything else."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence

from reward_loop.router.config import RouterConfig, WorkerConfig
from reward_loop.router.control import CONTROL_PATHS, OPEN_PATHS, control_plane
from reward_loop.router.exchange import Receive, Scope, Send
from reward_loop.router.headers import RawHeader, find
from reward_loop.router.health import check_health
from reward_loop.router.pool import WorkerPool
from reward_loop.router.proxy import Client, Proxy
from reward_loop.router.refusal import Refusal
from reward_loop.router.worker import Worker

__all__ = ["Router", "create_app"]


def create_app(workers: Iterable[str | WorkerConfig], config: RouterConfig | None = None) -> Router:
    """The router's ASGI app.

    ``GET /health`` and ``GET /ready`` are 200 while at least one server is usable, else 503; ``GET /live`` is 200
    in any case; ``GET /metrics`` is for
    Prometheus. ``GET``, ``POST`` and ``DELETE`` of ``/workers`` list, add and remove servers; ``POST /workers/drain``
    and ``/workers/resume`` give one no more requests, and again some. ``POST /workers/bury`` and ``/workers/retire``,
    with ``url`` and ``reason`` in the query, are for whoever owns the servers' processes: the first says that one has
    died and may come back, the second that it will not. All other requests go to a server.

    Args:
        workers: the servers, or their URLs.
        config: options.
    """
    configs = [WorkerConfig(url=worker) if isinstance(worker, str) else worker for worker in workers]
    return Router(configs, config or RouterConfig())


class Router:
    """An ASGI app; see :func:`create_app`."""

    def __init__(
        self,
        workers: list[WorkerConfig],
        config: RouterConfig,
        check: Callable[[Worker], Awaitable[None]] = check_health,
    ) -> None:
        self._workers = workers
        self._config = config
        self._check = check
        self._pool: WorkerPool
        self._proxy: Proxy
        # A route of FastAPI costs several times what forwarding a request does, so it sees its own paths only.
        self._control = control_plane(lambda: self._pool, lambda: self._proxy)
        self._credentials = f"Bearer {config.api_key}".encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or the lifespan."""
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if not self._is_allowed(scope["path"], scope["headers"]):
            headers, body = Refusal(401, "an API key is needed, as a bearer token").render()
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            return await send({"type": "http.response.body", "body": body})
        if scope["path"] in CONTROL_PATHS:
            return await self._control(scope, receive, send)
        return await self._proxy(scope, receive, send)

    def begin(self, client: Client) -> bool:
        """Serves a request in callbacks, if it may be forwarded at once; see :meth:`~.proxy.Proxy.begin`."""
        if client.path in CONTROL_PATHS or not self._is_allowed(client.path, client.headers):
            return False
        return self._proxy.begin(client)

    def _is_allowed(self, path: str, headers: Sequence[RawHeader]) -> bool:
        if self._credentials is None or path in OPEN_PATHS:
            return True
        return hmac.compare_digest(find(headers, b"authorization") or b"", self._credentials)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with WorkerPool(self._workers, self._check, self._config) as self._pool:
            self._proxy = Proxy(self._pool, self._config)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            self._proxy.close()
        await send({"type": "lifespan.shutdown.complete"})
