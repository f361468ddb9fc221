"""The metrics of the service, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "reward_loop_service_"
_BUCKETS_S = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and gauges of one service, in a registry of their own.

    Args:
        in_flight: returns the number of accepted samples that have not ended.
        running: returns the number of samples that are being scored.
    """

    def __init__(self, in_flight: Callable[[], float], running: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._samples = Counter(
            _PREFIX + "samples", "Samples that have ended.", ("path", "outcome"), registry=self._registry
        )
        self._dropped = Counter(
            _PREFIX + "dropped_samples", "Samples of requests that ended early.", ("path",), registry=self._registry
        )
        self._requests = Counter(
            _PREFIX + "requests", "Answers by status.", ("path", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            _PREFIX + "request_seconds", "Seconds per request.", ("path",), buckets=_BUCKETS_S, registry=self._registry
        )
        for name, text, value in (
            ("in_flight", "Accepted samples that have not ended.", in_flight),
            ("running", "Samples that are being scored.", running),
        ):
            Gauge(_PREFIX + name, text, registry=self._registry).set_function(value)

    def sample(self, path: str, outcome: str) -> None:
        """Count a sample that has ended."""
        self._samples.labels(path, outcome).inc()

    def dropped(self, path: str, count: int) -> None:
        """Count the samples of a request that ended early: a disconnect, a stop of the service, or an error."""
        self._dropped.labels(path).inc(count)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
