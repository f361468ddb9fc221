"""Scores the samples of requests, with bounds on their number, and cancels them when nobody waits for them.

Invariants:

- Every accepted sample belongs to one request. It ends with a result, or it is cancelled with its request.
- At most `max_in_flight` samples are accepted at a time; `concurrency` of them run.
- After `stop_from_signal`, no sample is accepted. Accepted ones have `grace_s` seconds to end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from reward_loop._util.text import first_line
from reward_loop._util.web_server import stop_on_disconnect
from reward_loop.adapters.service.replies import ServiceError
from reward_loop.agent import PendingRewards, RewardAgent
from reward_loop.errors import (
    ConfigError,
    JobServiceError,
    RewardLoopError,
    RewardsCancelledError,
    ScoringError,
    UnscoredError,
)
from reward_loop.managers.failures import Failures
from reward_loop.managers.scorer import Scorer, scores_groups
from reward_loop.scoring.signature import BY_NAME
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

logger = logging.getLogger(__name__)

_PARTS = frozenset({"ground_truth", "data_source", *BY_NAME}) - {"uid"}
"""The arguments of a function that come from a request, and may be missing there. Each sample gets a uid."""

MAX_LOGGED_CAUSES = 100
"""The number of different causes of failures that are logged at once."""

LINE_S = 60.0
"""The least number of seconds between two lines about the samples without a score."""


BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The upper bounds of the histogram of seconds per request."""


class Metrics:
    """The metrics of one service for Prometheus, in a registry of their own.

    Args:
        in_flight: returns the number of accepted samples that have not ended.
        running: returns the number of samples that are being scored.
    """

    def __init__(self, in_flight: Callable[[], float], running: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "reward_loop_service_"
        self.samples = Counter(prefix + "samples", "Samples that have ended.", ("path", "outcome"), registry=registry)
        self.dropped = Counter(
            prefix + "dropped_samples", "Samples of requests that ended early.", ("path",), registry=registry
        )
        self.requests = Counter(prefix + "requests", "Answers by status.", ("path", "status"), registry=registry)
        self.seconds = Histogram(
            prefix + "request_seconds", "Seconds per request.", ("path",), buckets=BUCKETS_S, registry=registry
        )
        Gauge(prefix + "in_flight", "Accepted samples that have not ended.", registry=registry).set_function(in_flight)
        Gauge(prefix + "running", "Samples that are being scored.", registry=registry).set_function(running)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class RewardService:
    """A reward manager that scores the samples of many requests. An async context manager: it owns all running samples.

    Args:
        scorer: the function with its manager; the service closes the manager.
        concurrency: how many samples are scored at a time.
        max_in_flight: how many samples are accepted at a time; further requests are answered with 429. By default
            16 times `concurrency`.
        data_source: the data source of samples that have none.
        grace_s: seconds that accepted samples have to end after a signal to stop.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        concurrency: int = 64,
        max_in_flight: int | None = None,
        data_source: str | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self.scorer = scorer
        self.max_in_flight = 16 * concurrency if max_in_flight is None else max_in_flight
        self.data_source = data_source
        self.in_flight = 0
        self.stopping = False
        self.metrics = Metrics(lambda: self.in_flight, lambda: self._agent.running)
        self._agent = RewardAgent(scorer.manager, concurrency=concurrency)
        self._grace_s = grace_s
        self._pending: set[PendingRewards] = set()
        self._name = secrets.token_hex(3)
        self._requests = 0
        self._causes: set[str] = set()
        self._failures = Failures()
        """The samples since the last line about those without a score."""
        self._last_line = time.monotonic()
        self._deadline: asyncio.TimerHandle | None = None
        self._ended: Callable[[], None] | None = None
        """Called when the service stops and no sample is in flight."""

    @property
    def name(self) -> str:
        """The name of the function, or of the manager class without one; for messages."""
        manager = self.scorer.manager
        return str(getattr(manager, "name", type(manager).__name__))

    @property
    def needs_groups(self) -> bool:
        """Whether samples can be scored only together with the other samples of their group."""
        return scores_groups(self.scorer.manager)

    async def __aenter__(self) -> Self:
        await self._agent.__aenter__()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.stopping = True
        if self._deadline is not None:
            self._deadline.cancel()
        await self._agent.__aexit__(kind, error, trace)

    def check_given(self, given: Collection[str], where: str, hint: str = "") -> None:
        """Check that a request contains what the function requires.

        Args:
            given: the parts that the request contains: arguments of a function, and ``step``.
            where: the name of the sample or the request, for the message.
            hint: how this kind of request gives the ground truth, for the message.

        Raises:
            ServiceError: a part is missing (422).
        """
        constant = () if self.data_source is None else ("data_source",)
        step = ("global_steps",) if "step" in given else ()
        missing = sorted((self.scorer.requires & _PARTS).difference(given, constant, step))
        if missing:
            advice = ". Start the service with --data-source NAME" if missing[0] == "data_source" else hint
            if missing[0] in BY_NAME:
                field = "step" if missing[0] == "global_steps" else missing[0]
                advice = f": give the parameter a default, or send it to /score as {field!r}"
            raise ServiceError(422, f"{where} has no {missing[0]}, which {self.name} requires{advice}")

    async def score(
        self, samples: Sequence[RewardSample], *, path: str, groups: Sequence[int] | None = None
    ) -> list[RewardResult]:
        """Score the samples of a request, and return their results in order. If cancelled, its samples are cancelled.

        Args:
            samples: the samples; members of a group are neighbours.
            path: the path of the request, for the metrics.
            groups: the size of each group; by default, each sample is a group of its own.

        Raises:
            ServiceError: the service is full (429) or stops (503), the samples do not fit into groups (422), or an
                error of the manager or the policy ``raise`` ended the request (500).
        """
        # No `await` before the samples are counted: two requests must not get the same room.
        self._check_room(len(samples))
        named = self.named(samples)
        try:
            pending = self._agent.submit(named, groups=groups)
        except ConfigError as error:
            raise ServiceError(422, str(error)) from None
        self._pending.add(pending)
        self.in_flight += len(named)
        rewards: list[Reward] | None = None
        try:
            rewards = await pending
        except RewardsCancelledError:
            raise ServiceError(503, "the service stopped before all samples were scored") from None
        except RewardLoopError as error:
            self._log(error.cause if isinstance(error, ScoringError) else first_line(str(error)), str(error))
            raise _as_service_error(error) from error
        finally:
            if rewards is None:
                self.metrics.dropped.labels(path).inc(len(named))
            pending.cancel()  # if this request was cancelled or one sample raised, the others would run on
            self._pending.discard(pending)
            self.in_flight -= len(named)
            self._end_if_idle()
        results = [RewardResult.of(reward, sample.uid) for sample, reward in zip(named, rewards, strict=True)]
        for result in results:
            self.metrics.samples.labels(path, result.outcome).inc()
            self._failures.add(result)
            if result.outcome is Outcome.FAILED:
                self._log(result.cause or "failed", result.error or "a sample failed")
        self._say_failures()
        return results

    async def score_request(
        self, request: Request, samples: Sequence[RewardSample], groups: Sequence[int] | None = None
    ) -> list[RewardResult]:
        """Score the samples of a request. If the client disconnects, its samples are cancelled.

        Raises:
            ServiceError: see `score`.
            ClientDisconnect: the client disconnected.
        """
        results: list[RewardResult] = []

        async def work() -> None:
            results.extend(await self.score(samples, path=request.url.path, groups=groups))

        if not await stop_on_disconnect(request.receive, work):
            raise ClientDisconnect
        return results

    def stop_from_signal(self, ended: Callable[[], None]) -> None:
        """Accept no more samples, and cancel the accepted ones after the grace period; a second call cancels them now.

        May be called by a signal handler or by another thread. ``ended`` is called when no sample is in flight.
        """
        loop = self._agent.loop
        if loop is None or loop.is_closed():
            ended()
        else:
            loop.call_soon_threadsafe(self._stop, ended)

    def _stop(self, ended: Callable[[], None]) -> None:
        if self.stopping:
            self._cancel_all()
            return
        self.stopping = True
        self._ended = ended
        self._end_if_idle()
        if self.in_flight:
            logger.info(
                "stopping: %d samples in flight have %g s to end; Ctrl-C cancels them", self.in_flight, self._grace_s
            )
        self._deadline = asyncio.get_running_loop().call_later(self._grace_s, self._cancel_all)

    def _end_if_idle(self) -> None:
        if self._ended is not None and not self.in_flight:
            self._ended()

    def _cancel_all(self) -> None:
        if self._pending:
            logger.warning("%d samples are cancelled", self.in_flight)
        # A copy: a request removes its batch when it ends.
        for pending in list(self._pending):
            pending.cancel()

    def _check_room(self, count: int) -> None:
        if self.stopping:
            raise ServiceError(503, "the service is stopping")
        if count > self.max_in_flight:
            raise ServiceError(
                413,
                f"the request has {count} samples, and at most {self.max_in_flight} are accepted at a time: send fewer "
                "in a request, or raise --max-in-flight",
            )
        if self.in_flight + count > self.max_in_flight:
            raise ServiceError(
                429,
                f"{self.in_flight} samples are in flight, and at most {self.max_in_flight} are accepted at a time: "
                "send the request again later, or raise --max-in-flight",
            )

    def named(self, samples: Sequence[RewardSample]) -> list[RewardSample]:
        """Return the samples of a request, each with a unique name and a data source where they have none."""
        self._requests += 1
        return [
            replace(
                sample,
                uid=f"{self._name}.{self._requests}.{index}" if sample.uid is None else sample.uid,
                data_source=sample.data_source or self.data_source or "",
            )
            for index, sample in enumerate(samples)
        ]

    def _say_failures(self) -> None:
        """Log how many of the latest samples have no score, at most once in `LINE_S` seconds."""
        now = time.monotonic()
        if now < self._last_line + LINE_S:
            return
        if line := self._failures.line():
            logger.warning("in the last %.0f s: %s", now - self._last_line, line)
        self._failures, self._last_line = Failures(), now

    def _log(self, cause: str, error: str) -> None:
        """Log the first error of each cause; all errors are in the answers, and in the records."""
        if cause not in self._causes and len(self._causes) < MAX_LOGGED_CAUSES:
            self._causes.add(cause)
            logger.warning("failed (further failures with this cause are counted, in one line a minute): %s", error)


def _as_service_error(error: RewardLoopError) -> ServiceError:
    if isinstance(error, JobServiceError):
        return ServiceError(503, str(error))
    outcome = Outcome.UNSCORED if isinstance(error, UnscoredError) else Outcome.FAILED
    return ServiceError(500, str(error), outcome=outcome if isinstance(error, ScoringError) else None)
