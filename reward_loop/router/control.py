"""The router's control plane: an HTTP API that lists, adds and changes servers, and shows metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from reward_loop._util.text import shorten
from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig
from reward_loop.router.http_server import ClientRequest
from reward_loop.router.messages import Refusal
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy

_PROBLEMS = 5
"""The number of validation errors that the answer to an invalid request lists."""


def control_plane(pool: BackendPool, proxy: Proxy) -> Callable[[ClientRequest, bytes], Awaitable[None]]:
    """Return the control plane: a function that answers a request, given its body."""
    return partial(_call_asgi, _app(pool, proxy))


def _app(pool: BackendPool, proxy: Proxy) -> FastAPI:
    """Return the endpoints. Most call the method of `BackendPool` that has their name.

    The owner of the server processes calls ``mark_dead``.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.exception_handler(StarletteHTTPException)
    async def refuse(request: Request, error: StarletteHTTPException) -> Response:
        allow = (error.headers or {}).get("Allow")
        return answer(request, Refusal(error.status_code, str(error.detail), allow=allow))

    @app.exception_handler(Refusal)
    async def pass_on(request: Request, refusal: Refusal) -> Response:
        return answer(request, refusal)

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(request: Request, error: RequestValidationError) -> Response:
        # Leave out the request's values, which may be long.
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        message = "; ".join(f"{where}: {what}" for where, what in problems[:_PROBLEMS])
        return answer(request, Refusal(422, message[:1000], param=problems[0][0][:100]))

    def answer(request: Request, refusal: Refusal) -> Response:
        proxy.log.refused_request(request.method, request.url.path, refusal)
        headers, body = refusal.render()
        return Response(body, refusal.status, {name.decode(): value.decode() for name, value in headers})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(pool, proxy), media_type=CONTENT_TYPE)

    @app.get("/workers")
    async def list_backends() -> list[dict[str, Any]]:
        return [_shown(backend) for backend in pool.backends]

    @app.post("/workers", status_code=201)
    async def add(backend: BackendConfig, request: Request) -> dict[str, Any]:
        # Its requests would come back to itself until all places are in use.
        if backend.url == str(request.base_url).rstrip("/"):
            raise HTTPException(422, f"{backend.url} is this router itself; name the address of a model server")
        if pool.find(backend.url):
            raise HTTPException(409, f"{backend.url} is already a server of this router")
        return _shown(pool.add(backend))

    @app.delete("/workers")
    async def remove(url: str) -> None:
        await pool.remove(find(url))

    @app.post("/workers/hung")  # not GET, which any web page can send: the report would not reach the owner
    async def next_hung() -> list[str]:
        """Wait until a server is hung, and return the URLs of such servers; their owner restarts them."""
        return await pool.next_hung()

    @app.post("/workers/mark_dead")
    async def mark_dead(url: str, reason: str) -> None:
        pool.mark_dead(find(url), reason)

    def find(url: str) -> Backend:
        backend = pool.find(url)
        if backend is None:
            raise HTTPException(404, f"unknown server {shorten(url)}")
        return backend

    return app


def _shown(backend: Backend) -> dict[str, Any]:
    return {
        "url": backend.url,
        "state": backend.state,
        "models": backend.models,
        "kind": backend.config.kind,
        "engine": backend.config.engine,
        "requests": backend.requests,
        "in_flight": backend.in_flight,
        "last_error": backend.last_error,
    }


async def _call_asgi(app: Callable[[Any, Any, Any], Awaitable[None]], client: ClientRequest, body: bytes) -> None:
    """Call an ASGI app, and send its answer to the client when the app has returned.

    Args:
        app: the app; its answers have a ``Content-Length``.
        client: the request. Its task is cancelled when the client disconnects, so the app gets no message of that.
        body: the body of the request.
    """
    raw_path, _, query = client.target.partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": client.version,
        "scheme": "http",
        "method": client.method,
        "root_path": "",
        "path": client.path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": client.headers,
    }
    unread = [body]
    head: MutableMapping[str, Any] = {}
    parts: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        if not unread:
            await asyncio.Event().wait()  # Until the task is cancelled.
        return {"type": "http.request", "body": unread.pop()}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
            return
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    # Only now: the client may send its next request as soon as it has the answer.
    client.answer(head["status"], head["headers"], b"".join(parts))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "reward_loop_router_"

Sample = tuple[dict[str, str], float]
"""The labels and the value of a metric."""


def render(pool: BackendPool, proxy: Proxy) -> bytes:
    """Return the current counters in Prometheus' text format."""
    servers = [({"worker": one.url, "model": ",".join(one.models)}, one) for one in pool.backends]
    answers: list[Sample] = [
        ({**labels, "status": str(status)}, count)
        for labels, one in servers
        for status, count in sorted(one.statuses.items())
    ]
    metrics: dict[str, list[Sample]] = {
        "refused_total": [({"status": str(status)}, count) for status, count in sorted(proxy.log.refused.items())],
        "worker_up": [(labels, one.up) for labels, one in servers],
        "worker_in_flight": [(labels, one.in_flight) for labels, one in servers],
        "answers_total": answers,
        "latency_seconds_total": [(labels, one.latency_sum_s) for labels, one in servers],
        "broken_total": [(labels, one.broken) for labels, one in servers],
        "retries_total": [(labels, one.retries) for labels, one in servers],
        "ejections_total": [(labels, one.ejections) for labels, one in servers],
    }
    lines = []
    for name, samples in metrics.items():
        lines.append(f"# TYPE {_PREFIX}{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for labels, value in samples:
            # Models may have any name. orjson escapes quotes, backslashes and line ends as the format does.
            shown = ",".join(f"{key}={orjson.dumps(text).decode()}" for key, text in labels.items())
            lines.append(f"{_PREFIX}{name}{{{shown}}} {float(value)}")
    return "\n".join([*lines, ""]).encode()
