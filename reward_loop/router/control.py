"""The router's control plane: an HTTP API that lists, adds and changes servers, and shows metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException as StarletteHTTPException

from reward_loop._util.text import shorten
from reward_loop.router.backend import LATENCY_BOUNDS_S, Backend, BackendState
from reward_loop.router.client_request import ClientRequest
from reward_loop.router.config import BackendConfig
from reward_loop.router.error_answers import Refusal
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
    async def next_hung() -> str:
        """Wait until a server is hung, and return its URL; its owner restarts it."""
        return (await pool.next_hung()).url

    @app.post("/workers/mark_dead")
    async def mark_dead(url: str, reason: str, lost: bool = False) -> None:
        pool.mark_dead(find(url), reason, lost=lost)

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
        "cooling_down": backend.cooling_down,
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
_LABELS = ("worker", "model")


def render(pool: BackendPool, proxy: Proxy) -> bytes:
    """Return the current metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(pool, proxy))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Reads the router's own counters when Prometheus scrapes them; requests do not update Prometheus objects."""

    def __init__(self, pool: BackendPool, proxy: Proxy) -> None:
        self._backends = pool.backends
        self._proxy = proxy

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        proxy, backends = self._proxy, self._backends
        yield GaugeMetricFamily(_PREFIX + "requests_in_flight", "Requests in flight.", proxy.gate.inside)
        yield GaugeMetricFamily(_PREFIX + "requests_queued", "Requests that wait for a place.", proxy.gate.waiting)
        yield GaugeMetricFamily(_PREFIX + "retries_left", "Retries that the budget allows now.", proxy.budget.left)

        refused = CounterMetricFamily(_PREFIX + "refused", "Error answers of the router itself.", labels=("status",))
        for status, count in sorted(proxy.log.refused.items()):
            refused.add_metric((str(status),), count)
        yield refused

        state = GaugeMetricFamily(
            _PREFIX + "worker_state", "1 for the current state of a server.", labels=(*_LABELS, "state")
        )
        in_flight = GaugeMetricFamily(_PREFIX + "worker_in_flight", "Requests in flight on a server.", labels=_LABELS)
        cooling_down = GaugeMetricFamily(
            _PREFIX + "worker_cooling_down", "1 while a server is cooling down.", labels=_LABELS
        )
        connections = GaugeMetricFamily(_PREFIX + "worker_connections", "Connections in use.", labels=_LABELS)
        answers = CounterMetricFamily(_PREFIX + "answers", "Answers by status.", labels=(*_LABELS, "status"))
        broken = CounterMetricFamily(_PREFIX + "broken", "Attempts whose connection failed or broke.", labels=_LABELS)
        retries = CounterMetricFamily(_PREFIX + "retries", "Attempts that were retried.", labels=_LABELS)
        ejections = CounterMetricFamily(
            _PREFIX + "ejections", "How often a server was taken out of use.", labels=_LABELS
        )
        latency = HistogramMetricFamily(_PREFIX + "latency_seconds", "Duration of attempts.", labels=_LABELS)
        for backend in backends:
            labels = (backend.url, ",".join(backend.models))
            for name in BackendState:
                state.add_metric((*labels, name.value), float(backend.state is name))
            in_flight.add_metric(labels, backend.in_flight)
            cooling_down.add_metric(labels, float(backend.cooling_down))
            connections.add_metric(labels, len(backend.upstream.busy))
            for status, count in sorted(backend.stats.statuses.items()):
                answers.add_metric((*labels, str(status)), count)
            broken.add_metric(labels, backend.stats.broken)
            retries.add_metric(labels, backend.stats.retries)
            ejections.add_metric(labels, backend.stats.ejections)
            latency.add_metric(labels, _buckets(backend), backend.stats.latency_sum_s)
        yield from (state, in_flight, cooling_down, connections, answers, broken, retries, ejections, latency)


def _buckets(backend: Backend) -> list[tuple[str, float]]:
    total = 0
    buckets = []
    for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], backend.stats.latencies, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
