"""The router's control plane."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response

from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig
from reward_loop.router.metrics import CONTENT_TYPE, render
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy

__all__ = ["control_plane"]


def control_plane(pool: BackendPool, proxy: Proxy) -> FastAPI:
    """An app that shows the servers and changes what is done with them."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(pool, proxy), media_type=CONTENT_TYPE)

    @app.get("/workers")
    async def list_backends() -> list[dict[str, Any]]:
        return [_shown(backend) for backend in pool.backends]

    @app.post("/workers", status_code=201)
    async def add(backend: BackendConfig) -> dict[str, Any]:
        if pool.find(backend.url):
            raise HTTPException(409, f"{backend.url} is there already")
        return _shown(pool.add(backend))

    @app.delete("/workers", status_code=202)
    async def remove(url: str) -> dict[str, Any]:
        backend = find(url)
        pool.remove(backend)
        return _shown(backend)

    @app.post("/workers/drain")
    async def drain(url: str) -> dict[str, Any]:
        backend = find(url)
        pool.drain(backend)
        return _shown(backend)

    @app.post("/workers/sleep")
    async def sleep(url: str) -> dict[str, Any]:
        backend = find(url)
        await pool.sleep(backend)
        return _shown(backend)

    @app.post("/workers/resume")
    async def resume(url: str) -> dict[str, Any]:
        backend = find(url)
        pool.resume(backend)
        return _shown(backend)

    @app.post("/workers/mark_dead")
    @app.post("/workers/bury")
    async def mark_dead(url: str, reason: str) -> None:
        pool.mark_dead(find(url), reason)

    @app.post("/workers/give_up")
    @app.post("/workers/retire")
    async def give_up(url: str, reason: str) -> None:
        pool.give_up(find(url), reason)

    def find(url: str) -> Backend:
        backend = pool.find(url)
        if backend is None:
            raise HTTPException(404, f"there is no backend {url}")
        return backend

    return app


def _shown(backend: Backend) -> dict[str, Any]:
    return {
        "url": backend.url,
        "state": backend.state,
        "resting": backend.cooling_down,
        "models": backend.models,
        "kind": backend.config.kind,
        "engine": backend.config.engine,
        "requests": backend.requests,
        "in_flight": backend.in_flight,
        "last_error": backend.last_error,
    }
