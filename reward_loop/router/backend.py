"""One server behind the router, and what the router knows about it."""

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
    """What the router knows about a server."""

    DOWN = "down"
    """Not in use: it is being asked for its health until it answers."""
    TRIAL = "trial"
    """Well again after a failure: one request at a time, until the first one succeeds."""
    UP = "up"
    """In use."""
    DRAINING = "draining"
    """Gets no new requests, and finishes those that it has."""
    ASLEEP = "asleep"
    """Its engine sleeps, because its owner wants it to: requests for it wait."""
    GIVEN_UP = "retired"
    """Never used again. The value is the one that the control plane and the metrics have always shown."""


@dataclass(slots=True, eq=False)
class Backend:
    """One server."""

    config: BackendConfig
    upstream: Upstream
    state: BackendState = BackendState.DOWN
    last_error: str | None = None
    """Why it was last taken out of use, or why its latest check failed."""
    requests: int = 0
    """How many requests it was given."""
    in_flight: int = 0
    models: tuple[str, ...] = ()
    """The models that it serves; none if that is not known."""
    cards: list[dict[str, Any]] = field(default_factory=list)
    """Their entries in its ``/v1/models``."""
    stats: BackendStats = field(default_factory=BackendStats)
    failures: int = 0
    """5xx answers since the last other one."""
    failed_checks: int = 0
    """Failed health checks since the last one that succeeded, while it is in use."""
    frozen: bool = False
    """Whether it is out of use because it accepts connections and answers nothing."""
    relapses: int = 0
    """How often in a row it failed on trial."""
    cools_down_until: float = 0.0
    """It asked for a pause until then (monotonic)."""
    trial_until: float = 0.0
    taken_out: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an asleep server has finished its last request, and while it is not asleep."""

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return self.config.url

    @property
    def cooling_down(self) -> bool:
        """Whether it has asked for a pause."""
        return self.cools_down_until > time.monotonic()

    def begin(self) -> None:
        """It is given a request."""
        self.requests += 1
        self.in_flight += 1

    def end(self, status: int, seconds: float) -> None:
        """It is done with a request, which it answered with a status, or with 0 if it did not."""
        self.in_flight -= 1
        if not self.in_flight and self.state is BackendState.ASLEEP:
            self.idle.set()
        if status:
            self.stats.count(status, seconds)

    def can_answer(self, model: str | None, kind: RequestKind | None) -> bool:
        """Whether it serves a model and a kind of request, as far as is known; ``None`` stands for any."""
        if model is not None and self.models and model not in self.models:
            return False
        own = self.config.kind
        if kind == "reranking":
            return own != "generative" or self.config.engine in ("sglang", "external")
        return kind is None or own in (None, kind)
