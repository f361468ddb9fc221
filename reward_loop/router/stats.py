"""Counters that cost next to nothing to keep; :mod:`~reward_loop.router.metrics` shows them."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["LATENCY_BOUNDS_S", "BackendStats"]

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class BackendStats:
    """What has happened with one server."""

    __slots__ = ("broken", "ejections", "latencies", "latency_sum_s", "retries", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """Answers by their status."""
        self.broken = 0
        """Attempts that brought no whole answer."""
        self.retries = 0
        """Attempts that were repeated, here or elsewhere."""
        self.ejections = 0
        self.latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        """Attempts by their duration: up to each bound, and beyond the last."""
        self.latency_sum_s = 0.0

    def count(self, status: int, seconds: float) -> None:
        """Adds an answer."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.latency_sum_s += seconds
