"""Limits in virtual time: rates, concurrency, and the order of grants."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.config import LimitConfig
from reward_loop.limits.limiter import COOL_DOWN_S, MARGIN, PERIOD_S, Concurrency, Limiter, Rate
from reward_loop.limits.local import Permit

CALLS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.1, 100), st.integers(0, 60), st.integers(1, 3)), min_size=1, max_size=60
)


class Request:
    """Stands for the future of a request: calls a function as soon as the permit is granted."""

    def __init__(self, granted: Callable[[], Any]) -> None:
        self._granted = granted
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, permit: Permit) -> None:
        self._done = True
        self._granted()

    def cancel(self) -> None:
        self._done = True


def enter(
    limiter: Limiter, now: float, granted: Callable[[], Any], order: float = 0.0, tokens: float = 0
) -> tuple[Permit, Request]:
    permit, request = Permit(None, "judge", tokens), Request(granted)
    limiter.enter(now, (order, 0.0), permit, request)  # type: ignore[arg-type]
    return permit, request


def drive(limiter: Limiter, calls: list[tuple[float, float, int, int]]) -> dict[int, float]:
    """Play calls (gap before it, seconds, tokens, step) in virtual time; return when each began."""
    now, arrival, numbers, began = 0.0, 0.0, itertools.count(), {}
    events: list[tuple[float, int, str, int]] = []

    def begins(number: int, seconds: float) -> Callable[[], None]:
        def begin() -> None:
            began[number] = now
            heapq.heappush(events, (now + seconds, next(numbers), "end", number))

        return begin

    for number, (gap, *_) in enumerate(calls):
        arrival += gap
        heapq.heappush(events, (arrival, next(numbers), "arrive", number))
    while events:
        now, _, what, number = heapq.heappop(events)
        if what == "arrive":
            _, seconds, tokens, step = calls[number]
            enter(limiter, now, begins(number, seconds), step, tokens)
        elif what == "end":
            limiter.leave(now)
        if (again := limiter.advance(now)) is not None:
            heapq.heappush(events, (again, next(numbers), "look", -1))
    return began


def greatest(amounts: list[tuple[float, float]], period: float) -> float:
    """Return the greatest sum of any half-open window of the period."""
    times = [time for time, _ in amounts]
    return max(sum(a for _, a in amounts[i : bisect_left(times, times[i] + period)]) for i in range(len(amounts)))


@given(CALLS, st.integers(1, 5), st.integers(1, 10), st.integers(60, 120))
def test_all_limits_hold_and_every_call_gets_its_turn(
    calls: list[tuple[float, float, int, int]], concurrent: int, requests: int, tokens: int
) -> None:
    config = LimitConfig(max_concurrent=concurrent, requests_per_minute=requests, tokens_per_minute=tokens)
    began = drive(Limiter("judge", config), calls)
    assert sorted(began) == list(range(len(calls)))
    spans = [(at, at + calls[number][1]) for number, at in began.items()]
    assert max(sum(b <= at < e for b, e in spans) for at, _ in spans) <= concurrent
    begins = sorted((at, calls[number][2]) for number, at in began.items())
    assert greatest([(at, 1) for at, _ in begins], PERIOD_S) <= requests
    assert greatest(begins, PERIOD_S) <= tokens + 60  # one call larger than a burst


@given(CALLS, st.integers(1, 200), st.floats(0.01, 30), st.floats(0, PERIOD_S * MARGIN))
def test_no_window_of_the_service_has_more_requests_than_the_limit_whatever_the_latency(
    calls: list[tuple[float, float, int, int]], limit: int, burst_seconds: float, latency: float
) -> None:
    rate, now, made = Rate(limit, burst_seconds, PERIOD_S, unit=1.0), 0.0, []
    for i, (gap, *_) in enumerate(calls):
        now = max(now + gap / 10, rate.free_at(1.0))
        rate.add(now, 1.0)
        made.append((now + latency * (i % 2), 1.0))
    assert greatest(sorted(made), PERIOD_S - 1e-6) <= limit


@pytest.mark.parametrize("limit", [1, 2, 60, 6000])
@pytest.mark.parametrize("burst_seconds", [0.01, 1.0])
def test_a_steady_rate_uses_95_percent_of_the_limit(limit: int, burst_seconds: float) -> None:
    rate, now, made = Rate(limit, burst_seconds, PERIOD_S, unit=1.0), 0.0, 0
    while now < 20 * PERIOD_S:
        now = max(now, rate.free_at(1.0))
        rate.add(now, 1.0)
        made += 1
    assert made >= 0.95 * limit * 20


def test_a_burst_may_start_at_once_and_a_larger_call_leaves_a_debt() -> None:
    rate = Rate(600, 1.0, PERIOD_S)  # 10 a second
    rate.add(0.0, 10)
    assert rate.free_at(1) == pytest.approx(0.103, abs=0.01)
    rate = Rate(600, 1.0, PERIOD_S)
    assert rate.free_at(300) <= 0.0
    rate.add(0.0, 300)
    assert rate.free_at(10) == pytest.approx(30.8, abs=0.1)


def test_an_estimate_is_corrected_only_while_it_counts() -> None:
    rate = Rate(600, 1.0, PERIOD_S)
    first = rate.add(0.0, 100)
    rate.correct(0.0, first, -90)
    assert rate.free_at(1) == pytest.approx(0.1, abs=0.01)
    rate.add(100.0, 100)
    rate.correct(100.0, first, -1000)  # long paid for
    assert rate.free_at(1) == pytest.approx(109.4, abs=1)
    rate.correct(100.0, first, 100)
    assert rate.free_at(1) == pytest.approx(119.7, abs=1)


def test_the_retry_after_of_an_overloaded_service_holds_back_all_calls_of_an_adaptive_limit() -> None:
    limiter, granted = Limiter("judge", LimitConfig(adaptive=True)), []
    for i in range(30):
        enter(limiter, 0.0, lambda i=i: granted.append(i))  # type: ignore[misc]
    assert len(granted) == 20
    for _ in range(10):
        limiter.leave(0.0, False, 7)
    for _ in range(10):
        limiter.leave(1.0)
    assert limiter.advance(1.0) == 7
    limiter.advance(7.0)
    assert len(granted) == 30


@pytest.mark.parametrize(("maximum", "largest"), [(None, 128), (50, 50)])
def test_an_adaptive_limit_grows_to_the_maximum_and_shrinks_once_for_each_overload(
    maximum: int | None, largest: int
) -> None:
    concurrency = Concurrency(maximum, adaptive=True)
    for _ in range(200):
        concurrency.answered(0.0, int(concurrency.limit))
    assert concurrency.limit == (160 if maximum is None else largest)
    before = int(concurrency.limit)
    for _ in range(before):
        concurrency.refused(1.0, None)
    assert concurrency.limit == int(0.8 * before)
    for _ in range(10 * before):
        concurrency.answered(2.0, before)  # within the cool-down
    assert concurrency.limit == int(0.8 * before)
    for _ in range(int(concurrency.limit)):
        concurrency.answered(2.0 + COOL_DOWN_S, before)
    assert concurrency.limit == int(0.8 * before) + 1


def test_answers_at_a_low_load_and_a_fixed_limit_change_nothing() -> None:
    adaptive, fixed = Concurrency(None, adaptive=True), Concurrency(64, adaptive=False)
    for _ in range(100):
        adaptive.answered(0.0, 3)
        fixed.refused(0.0, 60)
    assert (adaptive.limit, fixed.limit, fixed.not_before < 0) == (20, 64, True)


def test_runs_that_share_a_quota() -> None:
    limiter, granted = Limiter("judge", LimitConfig(max_concurrent=9, share=0.5)), []
    for i in range(9):
        enter(limiter, 0.0, lambda i=i: granted.append(i))  # type: ignore[misc]
    assert len(granted) == 4
    with pytest.raises(ValueError, match=r"max_concurrent=4 with a share of 0\.1 allows no call"):
        LimitConfig(max_concurrent=4, share=0.1)
