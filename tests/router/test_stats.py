from __future__ import annotations

from reward_loop.router.stats import LATENCY_BOUNDS_S, BackendStats


def test_answers_are_counted_by_status_and_duration() -> None:
    stats = BackendStats()
    for status, seconds in ((200, 0.001), (200, LATENCY_BOUNDS_S[0]), (500, 0.3), (200, 10_000.0)):
        stats.count(status, seconds)
    assert stats.statuses == {200: 3, 500: 1}
    # A bound counts as within; what is beyond the last one has a place of its own.
    assert (stats.latencies[0], stats.latencies[LATENCY_BOUNDS_S.index(0.5)], stats.latencies[-1]) == (2, 1, 1)
    assert sum(stats.latencies) == 4
    assert stats.latency_sum_s == 0.001 + LATENCY_BOUNDS_S[0] + 0.3 + 10_000
