"""One server behind the router: its state, its load, its counters and its health check."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from reward_loop.errors import ServerError
from reward_loop.router.config import BackendConfig, Kind
from reward_loop.router.http_client import BrokenError, StaleError, Upstream, UpstreamError
from reward_loop.router.messages import BACKEND, RawHeader


class Route(NamedTuple):
    """What the server for a request must be able to do."""

    model: str | None = None
    """The name of the model; ``None`` for any."""
    kind: Kind | None = None
    """The kind of the request; ``None`` for any."""


ANY = Route()
"""The route of requests that every server can answer."""


# eq=False: a server is a key of dicts, and equal only to itself.
@dataclass(slots=True, eq=False)
class Backend:
    """One server."""

    config: BackendConfig
    upstream: Upstream
    up: bool = False
    """Whether it is in use. If not, health checks are repeated until one succeeds."""
    last_error: str | None = None
    """Why the server is out of use: its latest failure, or that of its latest health check; ``None`` in use."""
    requests: int = 0
    """The number of requests sent so far."""
    in_flight: int = 0
    """The number of requests in flight."""
    models: tuple[str, ...] = field(init=False)
    """The names of the models that it serves; empty if unknown."""
    statuses: dict[int, int] = field(default_factory=dict)
    """The number of answers for each HTTP status."""
    latency_sum_s: float = 0.0
    """The total duration of answered attempts, in seconds."""
    broken: int = 0
    """Attempts whose connection failed or broke, except with a `StaleError`."""
    retries: int = 0
    """Attempts that were retried, on this server or on another, except after a `StaleError`."""
    ejections: int = 0
    """How often the server was taken out of use."""
    failures: int = 0
    """The number of 5xx answers in a row."""
    failed_checks: int = 0
    """The number of failed health checks in a row while the server is in use."""
    hung: bool = False
    """Whether the server is out of use because its engine does not answer, although its health checks succeed."""
    unanswered: int = 0
    """The number of requests in a row that ended without an answer at their deadline."""
    silent_reads: int = 0
    """The value of `Upstream.reads` at the first of them."""
    outages: int = 0
    """How often the server was taken out of use since a request last succeeded."""
    healthy_at: float = 0.0
    """The beginning of its latest successful health check, in seconds of `time.monotonic`."""
    died_at: float = 0.0
    """When its owner last reported its death, or a health check last failed, in seconds of `time.monotonic`."""
    taken_out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is taken out of use; starts its readmission."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last request in flight ends."""

    url: str = field(init=False)
    """``http://host:port``"""
    header: RawHeader = field(init=False)
    """The header of its answers that names it."""

    def __post_init__(self) -> None:
        self.url = self.config.url
        self.header = BACKEND, self.url.encode()
        self.models = self.config.models

    @property
    def state(self) -> str:
        """``up`` or ``down``, for messages."""
        return "up" if self.up else "down"

    def begin(self) -> None:
        """Count a request that is being sent."""
        self.requests += 1
        self.in_flight += 1

    def end(self, status: int, seconds: float) -> None:
        """Count the end of a request, with the status of its answer (0 if there was none) and its duration."""
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        if status:
            self.statuses[status] = self.statuses.get(status, 0) + 1
            self.latency_sum_s += seconds

    def can_answer(self, route: Route) -> bool:
        """Return whether the server can answer requests of a route; ``True`` if that is unknown."""
        # A server whose models are unknown is tried: its own 404 is clearer than a refusal here.
        if route.model is not None and self.models and route.model not in self.models:
            return False
        # Not only for a clear error: a chat request can crash a discriminative SGLang server.
        return route.kind is None or self.config.kind in (None, route.kind)


logger = logging.getLogger(__name__)

_BODY_UP_TO = 4 * 1024 * 1024


class AsleepError(ServerError):
    """The server is healthy, but its engine sleeps: a request to it would hang."""


async def check_health(backend: Backend) -> None:
    """Check a server's health; while the server is out of use, also update its `models`.

    Raises:
        AsleepError: the server's engine sleeps.
        ServerError: the server answered with a status of 400 or above.
        UpstreamError: the server sent no complete answer.
    """
    status, _ = await _request(backend.upstream, b"GET", "/health")
    if status >= 400:
        raise ServerError(f"GET /health returned {status}")
    if backend.config.engine == "vllm":
        # /health of a sleeping engine is 200. Servers that cannot sleep do not have /is_sleeping.
        status, body = await _request(backend.upstream, b"GET", "/is_sleeping")
        if status == 200 and _decoded(body).get("is_sleeping") is True:
            raise AsleepError("the engine is asleep")
    # Not at each check of a server in use: requests for unknown models have it asked again (`ask_for_model`).
    if not backend.up:
        await update_models(backend)


async def update_models(backend: Backend, wanted: str | None = None) -> None:
    """Ask a server for its models, and update its `models`; if it sends no list, they stay as they are.

    Args:
        backend: the server. If its configuration names models, it has these, and of those that it lists only the wanted
            one, and those that were wanted before.
        wanted: a name that a request used.
    """
    try:
        status, body = await _request(backend.upstream, b"GET", "/v1/models")
    except UpstreamError as error:
        logger.info("the models of %s are unknown: %s", backend.url, error)
        return
    cards = _decoded(body).get("data") if status == 200 else None
    if isinstance(cards, list):
        listed = tuple(card["id"] for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str))
        named = backend.config.models
        known = {wanted, *backend.models}
        backend.models = named + tuple(name for name in listed if name in known - {*named}) if named else listed


async def ask_for_one_token(backend: Backend) -> None:
    """Ask the server's engine for one token, or for the score of one, and wait for any answer.

    Raises:
        UpstreamError: the server sent no complete answer.
    """
    fields: dict[str, Any] = {"model": backend.models[0]} if backend.models else {}
    if backend.config.kind == "discriminative":
        path = "/classify"
        # Not an empty text, which can crash SGLang.
        fields |= {"text": "1"} if backend.config.engine == "sglang" else {"input": "1"}
    else:
        path = "/v1/chat/completions"
        fields |= {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    await _request(backend.upstream, b"POST", path, orjson.dumps(fields))


async def _request(upstream: Upstream, method: bytes, path: str, body: bytes = b"") -> tuple[int, bytes]:
    headers = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body) if body else b""
    try:
        answer = await upstream.request(method, path.encode(), headers, body, is_check=True)
    except StaleError:
        # The server has probably closed the other idle connections too: they are of about the same age.
        upstream.close_idle()
        answer = await upstream.request(method, path.encode(), headers, body, is_check=True)
    try:
        content = b""
        while part := await answer.read():
            content += part
            # A health check must not fill the memory of the router, whatever a server sends.
            if len(content) > _BODY_UP_TO:
                raise BrokenError(f"the answer to {path} is longer than {_BODY_UP_TO} bytes")
    finally:
        answer.close()
    return answer.status, content


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
