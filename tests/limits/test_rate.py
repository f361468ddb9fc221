from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.limits.limiter import GRAINS, MARGIN, Rate

PERIOD = 60.0

gaps = st.floats(0, 90)
calls = st.lists(st.tuples(gaps, st.integers(1, 40)), min_size=1, max_size=80)


def rate(limit, burst_seconds=60.0, unit=0.0):
    made = Rate(PERIOD, unit)
    made.configure(limit, burst_seconds)
    return made


def greatest(charges: list[tuple[float, float]], period: float) -> float:
    """The greatest sum of any half-open window of the period."""
    times = [time for time, _ in charges]
    return max(sum(a for _, a in charges[i : bisect_left(times, times[i] + period)]) for i in range(len(charges)))


@given(calls, st.integers(40, 120))
def test_no_window_ever_holds_more_than_the_limit(calls, limit):
    window, now, made = rate(limit), 0.0, []
    for gap, amount in calls:
        now += gap
        at = window.free_at(now, amount)
        assert at >= now
        if at > now:
            # Just before that moment, there is no room.
            assert window.free_at((now + at) / 2, amount) > (now + at) / 2 or (now + at) / 2 == at
        now = at
        window.add(now, amount)
        made.append((now, amount))
    assert greatest(made, PERIOD) <= limit


@given(calls, st.floats(0, PERIOD * MARGIN))
def test_nor_does_one_of_the_service_to_which_calls_take_a_while(calls, latency):
    window, now, made = rate(50), 0.0, []
    for i, (gap, amount) in enumerate(calls):
        now = window.free_at(now + gap, amount)
        window.add(now, amount)
        made.append((now + latency * (i % 2), amount))
    made.sort()
    assert greatest(made, PERIOD) <= 50 + 1e-9


def test_many_calls_are_few_charges():
    window = rate(None)
    for i in range(10_000):
        window.add(i / 10_000, 1)
    assert window.used(1.0) == 10_000
    assert len(window._charges) <= GRAINS + 1


@pytest.mark.parametrize("limit", [None, 1000])
def test_charges_older_than_the_window_are_deleted(limit):
    window = rate(limit)
    for second in range(10_000):
        now = float(second)
        window.free_at(now, 1)
        window.add(now, 1)
    assert len(window._charges) <= PERIOD * (1 + MARGIN) + 1


def test_an_estimate_is_corrected():
    window = rate(100)
    charge = window.add(0.0, 80)
    assert window.free_at(1.0, 50) > 1.0
    window.change(1.0, charge, -60)
    assert window.free_at(1.0, 50) == 1.0
    window.change(2.0, charge, 110)
    assert window.free_at(2.0, 1) == PERIOD * (1 + MARGIN)
    window.change(2 * PERIOD, charge, 1000)
    assert window.free_at(2 * PERIOD, 100) == 2 * PERIOD
    assert window.free_at(2 * PERIOD, 101) == float("inf")


@pytest.mark.parametrize("limit", [1, 2, 60, 6000])
@pytest.mark.parametrize("burst_seconds", [0.01, 1.0, 60.0])
def test_a_paced_rate_uses_95_percent_of_the_limit_and_a_burst_of_a_minute_98_percent(limit, burst_seconds):
    paced, now, made = rate(limit, burst_seconds, unit=1.0), 0.0, 0
    while now < 20 * PERIOD:
        now = paced.free_at(now, 1)
        if paced.free_at(now, 1) <= now:
            paced.add(now, 1)
            made += 1
    assert made >= (0.98 if burst_seconds == PERIOD else 0.95) * limit * 20


@given(calls, st.floats(0.01, 10))
def test_a_burst_is_bounded(calls, burst_seconds):
    paced, now, made = rate(120, burst_seconds), 0.0, []
    for gap, amount in calls:
        now += gap
        while (at := paced.free_at(now, amount)) > now:
            now = at
        paced.add(now, amount)
        made.append((now, amount))
    # Each begins when the earlier ones are refilled but for a burst, or the whole burst if it is larger.
    for i, (first, _) in enumerate(made):
        total = 0.0
        for time, amount in made[i:]:
            allowed = paced.burst + (time - first) * 2 + 1e-6
            assert total + min(amount, paced.burst) <= allowed
            total += amount


def test_later_calls_wait_for_the_debt_of_a_call_above_the_burst():
    paced = rate(600)  # 10 a second
    paced.configure(600, 1.0)
    assert paced.free_at(0.0, 300) == 0.0
    paced.add(0.0, 300)
    assert paced.free_at(0.0, 1) == pytest.approx(29.1)
    assert paced.free_at(0.0, 0) == pytest.approx(29.0)
