"""Counters of each server; :mod:`~reward_loop.router.metrics` renders them for Prometheus."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["LATENCY_BOUNDS_S", "BackendStats"]

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class BackendStats:
    """Counters of one server."""

    __slots__ = ("broken", "ejections", "latencies", "latency_sum_s", "retries", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """The number of answers for each HTTP status."""
        self.broken = 0
        """Attempts whose connection failed or broke, except with a `StaleError`."""
        self.retries = 0
        """Attempts that were retried, on this server or on another, except after a `StaleError`."""
        self.ejections = 0
        """How often the server was taken out of use."""
        self.latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        """A histogram of answered attempts by duration: one bucket for each bound, and one for longer attempts."""
        self.latency_sum_s = 0.0
        """The total duration of answered attempts, in seconds."""

    def count(self, status: int, seconds: float) -> None:
        """Counts an answer with its status and the duration of the attempt."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.latency_sum_s += seconds
