"""The router's control plane."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response

from reward_loop.router.backend import Worker
from reward_loop.router.config import WorkerConfig
from reward_loop.router.metrics import CONTENT_TYPE, render
from reward_loop.router.pool import WorkerPool
from reward_loop.router.proxy import Proxy

__all__ = ["control_plane"]


def control_plane(pool: WorkerPool, proxy: Proxy) -> FastAPI:
    """An app that shows the servers and changes what is done with them."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(pool, proxy), media_type=CONTENT_TYPE)

    @app.get("/workers")
    async def list_workers() -> list[dict[str, Any]]:
        return [_shown(worker) for worker in pool.workers]

    @app.post("/workers", status_code=201)
    async def add(worker: WorkerConfig) -> dict[str, Any]:
        if pool.find(worker.url):
            raise HTTPException(409, f"{worker.url} is there already")
        return _shown(pool.add(worker))

    @app.delete("/workers", status_code=202)
    async def remove(url: str) -> dict[str, Any]:
        worker = find(url)
        pool.remove(worker)
        return _shown(worker)

    @app.post("/workers/drain")
    async def drain(url: str) -> dict[str, Any]:
        worker = find(url)
        pool.drain(worker)
        return _shown(worker)

    @app.post("/workers/sleep")
    async def sleep(url: str) -> dict[str, Any]:
        worker = find(url)
        await pool.sleep(worker)
        return _shown(worker)

    @app.post("/workers/resume")
    async def resume(url: str) -> dict[str, Any]:
        worker = find(url)
        pool.resume(worker)
        return _shown(worker)

    @app.post("/workers/bury")
    async def bury(url: str, reason: str) -> None:
        pool.bury(find(url), reason)

    @app.post("/workers/retire")
    async def retire(url: str, reason: str) -> None:
        pool.retire(find(url), reason)

    def find(url: str) -> Worker:
        worker = pool.find(url)
        if worker is None:
            raise HTTPException(404, f"there is no worker {url}")
        return worker

    return app


def _shown(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "state": worker.state,
        "resting": worker.resting,
        "models": worker.models,
        "kind": worker.config.kind,
        "engine": worker.config.engine,
        "requests": worker.requests,
        "in_flight": worker.in_flight,
        "last_error": worker.last_error,
    }
