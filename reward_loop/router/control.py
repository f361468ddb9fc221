"""The router's control plane: an HTTP API that lists, adds and changes servers, and shows metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import orjson

from reward_loop._util.text import shorten
from reward_loop.config import parse
from reward_loop.errors import ConfigError
from reward_loop.router.backend import Backend, BackendState
from reward_loop.router.config import BackendConfig
from reward_loop.router.http_server import ClientRequest
from reward_loop.router.messages import Refusal, find
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy

METHODS = {
    "/metrics": ("GET",),
    "/workers": ("GET", "POST", "DELETE"),
    "/workers/hung": ("POST",),  # not GET, which any web page can send: the report would not reach the owner
    "/workers/mark_dead": ("POST",),
}
"""The paths of the control plane, and their methods."""


async def serve_control_plane(pool: BackendPool, proxy: Proxy, client: ClientRequest, body: bytes) -> None:
    """Answer a request whose path is in `METHODS`.

    Raises:
        Refusal: the method, the query or the body is not valid, or the server is unknown.
    """
    query = dict(parse_qs(client.target.partition(b"?")[2].decode("latin-1")))

    def argument(name: str) -> str:
        if name not in query:
            raise Refusal(422, f"query.{name} is missing", param=name)
        return query[name][0]

    def backend() -> Backend:
        url = argument("url")
        if (found := pool.find(url)) is None:
            raise Refusal(404, f"unknown server {shorten(url)}")
        return found

    match client.method, client.path:
        case "GET", "/metrics":
            client.answer_ok(render(pool, proxy), b"text/plain; version=0.0.4; charset=utf-8")
        case "GET", "/workers":
            client.answer_ok(orjson.dumps([_shown(backend) for backend in pool.backends]))
        case "POST", "/workers":
            client.answer_ok(orjson.dumps(_shown(pool.add(_new_server(pool, client, body)))))
        case "DELETE", "/workers":
            await pool.remove(backend())
            client.answer_ok(b"null")
        case "POST", "/workers/hung":
            # Waits until a server is hung; its owner restarts it.
            client.answer_ok(orjson.dumps((await pool.next_hung()).url))
        case "POST", "/workers/mark_dead":  # by the owner of the server processes
            reason, lost = argument("reason"), query.get("lost") == ["true"]
            pool.mark_dead(backend(), reason, lost=lost)
            client.answer_ok(b"null")
        case _:
            allowed = ", ".join(METHODS[client.path])
            raise Refusal(405, f"{client.path} takes {allowed}", allow=allowed)


def _new_server(pool: BackendPool, client: ClientRequest, body: bytes) -> BackendConfig:
    try:
        config = parse(BackendConfig, orjson.loads(body), "body")
    except (orjson.JSONDecodeError, ConfigError, RecursionError) as error:
        raise Refusal(422, f"the body is not a server: {error}"[:1000]) from None
    # Its requests would come back to itself until all places are in use.
    if config.url == "http://" + (find(client.headers, b"host") or b"").decode("latin-1"):
        raise Refusal(422, f"{config.url} is this router itself; name the address of a model server")
    if pool.find(config.url):
        raise Refusal(409, f"{config.url} is already a server of this router")
    return config


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


_PREFIX = "reward_loop_router_"

Sample = tuple[dict[str, str], float]
"""The labels and the value of a metric."""


def render(pool: BackendPool, proxy: Proxy) -> bytes:
    """Return the current counters in Prometheus' text format."""
    servers = [({"worker": one.url, "model": ",".join(one.models)}, one) for one in pool.backends]

    def each(value: Callable[[Backend], float]) -> list[Sample]:
        return [(labels, value(backend)) for labels, backend in servers]

    states = [
        ({**labels, "state": state.value}, float(backend.state is state))
        for labels, backend in servers
        for state in BackendState
    ]
    answers = [
        ({**labels, "status": str(status)}, float(count))
        for labels, backend in servers
        for status, count in sorted(backend.statuses.items())
    ]
    refused = [({"status": str(status)}, float(count)) for status, count in sorted(proxy.log.refused.items())]
    metrics: dict[str, tuple[str, list[Sample]]] = {
        "requests_in_flight": ("gauge", [({}, proxy.gate.inside)]),
        "requests_queued": ("gauge", [({}, proxy.gate.waiting)]),
        "refused_total": ("counter", refused),
        "worker_state": ("gauge", states),
        "worker_in_flight": ("gauge", each(lambda one: one.in_flight)),
        "answers_total": ("counter", answers),
        "latency_seconds_total": ("counter", each(lambda one: one.latency_sum_s)),
        "broken_total": ("counter", each(lambda one: one.broken)),
        "retries_total": ("counter", each(lambda one: one.retries)),
        "ejections_total": ("counter", each(lambda one: one.ejections)),
    }
    lines = []
    for name, (kind, samples) in metrics.items():
        lines.append(f"# TYPE {_PREFIX}{name} {kind}")
        for labels, value in samples:
            # Models may have any name. orjson escapes quotes, backslashes and line ends as the format does.
            shown = ",".join(f"{key}={orjson.dumps(text).decode()}" for key, text in labels.items())
            lines.append(f"{_PREFIX}{name}{{{shown}}} {float(value)}")
    return "\n".join([*lines, ""]).encode()
