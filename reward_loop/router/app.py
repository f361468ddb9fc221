"""The router: a control plane of its own, and the proxy for everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientTimeout
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from reward_loop.router.pool import Worker, WorkerPool
from reward_loop.router.proxy import Proxy, client_session

__all__ = ["create_app"]

_PROBE_TIMEOUT = ClientTimeout(total=30)


def create_app(workers: Sequence[str], *, timeout_s: float = 600.0) -> FastAPI:
    """The router's ASGI app.

    ``GET /health`` is 200 while at least one worker is usable, else 503; ``GET /workers`` lists them.
    ``POST /workers/bury`` and ``POST /workers/retire``, with ``url`` and ``reason`` in the query, are for whoever owns
    the workers' processes: the first says that one has died and may come back, the second that it will not. All other
    requests go to a worker.

    Args:
        workers: the servers, ``http://host:port`` each.
        timeout_s: seconds from the arrival of a request to the end of its answer.
    """
    pool: WorkerPool
    proxy: Proxy

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal pool, proxy
        async with client_session() as session:

            async def probe(url: str) -> None:
                async with session.get(f"{url}/health", timeout=_PROBE_TIMEOUT) as response:
                    response.raise_for_status()

            async with WorkerPool(workers, probe) as pool:
                proxy = Proxy(pool, session, timeout_s)
                yield

    # Only the routes below are the router's; documentation pages would hide the workers'.
    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)

    @app.get("/health")
    async def health() -> JSONResponse:
        if pool.usable:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "workers": pool.describe()}, 503)

    @app.get("/workers")
    async def list_workers() -> list[dict[str, Any]]:
        shown = ("url", "state", "last_error", "requests")
        return [{name: getattr(worker, name) for name in shown} for worker in pool.workers]

    @app.post("/workers/bury")
    async def bury(url: str, reason: str) -> None:
        pool.bury(find(url), reason)

    @app.post("/workers/retire")
    async def retire(url: str, reason: str) -> None:
        pool.retire(find(url), reason)

    def find(url: str) -> Worker:
        for worker in pool.workers:
            if worker.url == url:
                return worker
        raise HTTPException(404, f"there is no worker {url}")

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        await proxy(scope, receive, send)

    app.mount("/", forward)
    return app
