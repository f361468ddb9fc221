from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.limits.window import GRAINS, MARGIN, SlidingWindow

PERIOD = 60.0

gaps = st.floats(0, 90)
calls = st.lists(st.tuples(gaps, st.integers(1, 40)), min_size=1, max_size=80)


def greatest(charges: list[tuple[float, float]], period: float) -> float:
    """The greatest sum of any half-open window of the period."""
    times = [time for time, _ in charges]
    return max(sum(a for _, a in charges[i : bisect_left(times, times[i] + period)]) for i in range(len(charges)))


@given(calls, st.integers(40, 120), st.sampled_from([SlidingWindow.add, SlidingWindow.count]))
def test_no_window_ever_holds_more_than_the_limit(calls, limit, count):
    window, now, made = SlidingWindow(limit, PERIOD), 0.0, []
    for gap, amount in calls:
        now += gap
        at = window.free_at(now, amount)
        assert at >= now
        if at > now:
            # Just before that moment, there is no room.
            assert window.free_at((now + at) / 2, amount) > (now + at) / 2 or (now + at) / 2 == at
        now = at
        count(window, now, amount)
        made.append((now, amount))
    assert greatest(made, PERIOD) <= limit


@given(calls, st.floats(0, PERIOD * MARGIN), st.sampled_from([SlidingWindow.add, SlidingWindow.count]))
def test_nor_does_one_of_the_service_to_which_calls_take_a_while(calls, latency, count):
    window, now, made = SlidingWindow(50, PERIOD), 0.0, []
    for i, (gap, amount) in enumerate(calls):
        now = window.free_at(now + gap, amount)
        count(window, now, amount)
        made.append((now + latency * (i % 2), amount))
    made.sort()
    assert greatest(made, PERIOD) <= 50 + 1e-9


def test_many_calls_are_few_charges():
    window = SlidingWindow(float("inf"), PERIOD)
    for i in range(10_000):
        window.count(i / 10_000, 1)
    assert window.used(1.0) == 10_000
    assert len(window._charges) <= GRAINS + 1


@pytest.mark.parametrize("count", [SlidingWindow.add, SlidingWindow.count])
def test_it_is_used_to_99_percent(count):
    window, now, made = SlidingWindow(600, PERIOD), 0.0, 0
    while now < 100 * PERIOD:
        now = window.free_at(now, 1)
        count(window, now, 1)
        made += 1
    assert made / (600 * 100) > 0.985


def test_a_bucket_would_let_twice_as_much_through():
    # 600 at once, and then as soon as there is room: a bucket that refills has room at once.
    window = SlidingWindow(600, PERIOD)
    for _ in range(600):
        assert window.free_at(0.0, 1) == 0.0
        window.add(0.0, 1)
    assert window.free_at(0.1, 1) > PERIOD


def test_an_estimate_is_corrected():
    window = SlidingWindow(100, PERIOD)
    charge = window.add(0.0, 80)
    assert window.free_at(1.0, 50) > 1.0
    window.correct(1.0, charge, 20)
    assert window.free_at(1.0, 50) == 1.0
    window.correct(2.0, charge, 130)
    assert window.free_at(2.0, 1) == PERIOD * (1 + MARGIN)
    window.correct(2 * PERIOD, charge, 1000)
    assert window.free_at(2 * PERIOD, 100) == 2 * PERIOD


def test_what_never_fits():
    assert SlidingWindow(10, PERIOD).free_at(0.0, 11) == float("inf")
