"""One server behind the router: its state, its load, and its health."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reward_loop.router.config import BackendConfig, RequestKind
from reward_loop.router.http_client import Upstream
from reward_loop.router.stats import BackendStats

__all__ = ["Backend", "BackendState"]


class BackendState(StrEnum):
    """Whether a server receives requests; :mod:`~reward_loop.router.pool` has the table of states and transitions."""

    DOWN = "down"
    """Not in use: health checks are repeated until one succeeds."""
    TRIAL = "trial"
    """Healthy again after a failure: one request at a time, until the first one succeeds."""
    UP = "up"
    """In use."""
    DRAINING = "draining"
    """Receives no new requests; requests in flight continue."""
    ASLEEP = "asleep"
    """Its owner has put the engine to sleep: requests for it wait."""
    GIVEN_UP = "retired"
    """Not used until `BackendPool.resume`. The control plane and the metrics show the value, which is older than the
    name."""


@dataclass(slots=True, eq=False)
class Backend:
    """One server."""

    config: BackendConfig
    upstream: Upstream
    state: BackendState = BackendState.DOWN
    last_error: str | None = None
    """Why the server was last taken out of use, or why its latest health check failed."""
    requests: int = 0
    """The number of requests sent so far."""
    in_flight: int = 0
    """The number of requests in flight."""
    models: tuple[str, ...] = ()
    """The names of the models that it serves; empty if unknown."""
    cards: list[dict[str, Any]] = field(default_factory=list)
    """The models' entries in the server's ``/v1/models``."""
    stats: BackendStats = field(default_factory=BackendStats)
    failures: int = 0
    """The number of 5xx answers in a row."""
    failed_checks: int = 0
    """The number of failed health checks in a row while the server is in use."""
    frozen: bool = False
    """Whether the server is out of use because it accepts connections but its health checks time out."""
    relapses: int = 0
    """How many trials in a row have failed."""
    cools_down_until: float = 0.0
    """The end of its cool-down, in seconds of `time.monotonic`."""
    trial_until: float = 0.0
    """When its trial counts as passed although the first request has not ended, in seconds of `time.monotonic`."""
    taken_out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is taken out of use; starts its readmission."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a sleeping server has no more requests in flight, and when it is not asleep."""

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return self.config.url

    @property
    def cooling_down(self) -> bool:
        """Whether the server is cooling down after a 429 or 503."""
        return self.cools_down_until > time.monotonic()

    def begin(self) -> None:
        """Counts a request that is being sent."""
        self.requests += 1
        self.in_flight += 1

    def end(self, status: int, seconds: float) -> None:
        """Counts the end of a request.

        Args:
            status: the HTTP status of the answer; 0 if there was none.
            seconds: the duration of the attempt.
        """
        self.in_flight -= 1
        if not self.in_flight and self.state is BackendState.ASLEEP:
            self.idle.set()
        if status:
            self.stats.count(status, seconds)

    def can_answer(self, model: str | None, kind: RequestKind | None) -> bool:
        """Returns whether the server can answer requests of a kind for a model; ``True`` if that is unknown.

        Args:
            model: the model's name; ``None`` for any model.
            kind: the kind of request; ``None`` for any kind.
        """
        if model is not None and self.models and model not in self.models:
            return False
        own = self.config.kind
        if kind == "reranking":
            return own != "generative" or self.config.engine in ("sglang", "external")
        return kind is None or own in (None, kind)
