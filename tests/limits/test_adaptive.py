import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.config import LimitConfig
from reward_loop.limits.limiter import COOL_DOWN_S, CUT, INITIAL, MAX_BACKGROUND, WINDOW, AdaptiveConcurrency, Limiter
from tests.limits.asking import asking


def a_round(adaptive, now=0.0):
    for _ in range(adaptive.calls):
        adaptive.answered(now, adaptive.calls)


def refuse(adaptive, now=0.0, retry_after=None):
    """Refuse so many calls that chance does not explain it; calls from before an earlier cut do not count."""
    for _ in range(adaptive._ignored + WINDOW // 10):
        adaptive.refused(now, adaptive.calls, retry_after)


def refuse_share(adaptive, share, now):
    for number in range(2 * WINDOW):
        if number % 10 < 10 * share:
            adaptive.refused(now, adaptive.calls)
        else:
            adaptive.answered(now, adaptive.calls)


def test_the_limit_doubles_until_the_first_refusal_and_then_grows_slowly():
    adaptive = AdaptiveConcurrency()
    assert adaptive.calls == INITIAL
    a_round(adaptive)
    a_round(adaptive)
    assert adaptive.calls == 4 * INITIAL
    adaptive.refused(0.0, adaptive.calls)
    assert adaptive.calls == 4 * INITIAL  # a service may refuse a call now and then
    refuse(adaptive)
    cut = adaptive.calls
    assert cut == int(4 * INITIAL * CUT)
    a_round(adaptive)  # of calls from before the cut
    a_round(adaptive, COOL_DOWN_S)
    assert cut < adaptive.calls <= cut * 1.05 + 1


def test_refusals_of_one_burst_cut_the_limit_once_and_pause_its_growth():
    adaptive = AdaptiveConcurrency()
    refuse(adaptive, 1.0)
    assert adaptive.calls == INITIAL * CUT
    a_round(adaptive, 2.0)
    assert adaptive.calls == INITIAL * CUT
    refuse(adaptive, 1.0 + COOL_DOWN_S)
    assert adaptive.calls == int(INITIAL * CUT * CUT)


def test_retry_after_is_obeyed_and_lengthens_the_cool_down():
    adaptive = AdaptiveConcurrency()
    refuse(adaptive, 0.0, retry_after=100)
    assert adaptive.not_before == 100
    refuse(adaptive, 50.0, retry_after=10)
    assert adaptive.not_before == 100
    assert adaptive.calls == INITIAL * CUT


def test_a_limit_that_is_not_reached_does_not_grow():
    adaptive = AdaptiveConcurrency()
    for _ in range(1000):
        adaptive.answered(0.0, 1)
    assert adaptive.calls == INITIAL


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=300), st.integers(1, 50))
def test_the_limit_stays_between_one_and_the_maximum(events, maximum):
    adaptive, now = AdaptiveConcurrency(maximum), 0.0
    for refused, pause in events:
        now += pause
        if refused:
            adaptive.refused(now, adaptive.calls)
        else:
            a_round(adaptive, now)
        assert 1 <= adaptive.calls <= maximum


def play(*, refuse=0.0, capacity=None, calls=3000, latency=0.5, maximum=64, seed=0):
    """Make calls to a service in virtual time; return the seconds, and the largest number of calls at each second.

    The service refuses a share of the calls at random, and those above its capacity, which may be a function of the
    time. A refusal takes 10 ms and has ``Retry-After: 1``; the call is then made again.
    """
    rng = random.Random(seed)
    limiter = Limiter("judge", LimitConfig(adaptive=True, max_concurrent=maximum))
    now, order, events, served, limits, ended = 0.0, itertools.count(), [], 0, [], 0

    def after(seconds, what):
        heapq.heappush(events, (now + seconds, next(order), what))

    def ask():
        limiter.enter(now, asking(0, "train", lambda: after(0.0, "begin")))

    for _ in range(calls):
        ask()
    after(1.0, "second")
    while ended < calls:
        now, _, what = heapq.heappop(events)
        if what == "begin":
            at_most = capacity(now) if callable(capacity) else capacity
            if rng.random() < refuse or (at_most is not None and served >= at_most):
                after(0.01, "refuse")
            else:
                served += 1
                after(latency * rng.uniform(0.5, 1.5), "answer")
        elif what == "answer":
            served -= 1
            ended += 1
            limiter.leave(now, accepted=True)
        elif what == "refuse":
            limiter.leave(now, accepted=False, retry_after=1.0)
            after(1.0, "again")
        elif what == "again":
            ask()
        elif what == "second":
            limits.append(limiter.max_in_flight)
            after(1.0, "second")
        again = limiter.advance(now)
        if again is not None:
            after(again - now, "look")
        assert now < 3600, "the calls do not end"
    return now, limits


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_refusals_that_do_not_depend_on_the_load_do_not_lower_the_limit(share, seed):
    best, _ = play(calls=6000)
    seconds, limits = play(calls=6000, refuse=share, seed=seed)
    assert seconds < 1.5 * best
    assert sum(limits) / len(limits) > 48


@pytest.mark.parametrize("capacity", [10, 30, 50])
def test_a_service_at_its_capacity_lowers_the_limit(capacity):
    _, limits = play(capacity=capacity, calls=6000)
    late = limits[len(limits) // 2 :]
    assert max(late) <= 1.3 * capacity
    assert sum(late) / len(late) >= 0.7 * capacity


def test_during_an_outage_the_limit_falls_and_then_recovers():
    # For 60 s the service answers only one call at a time.
    seconds, limits = play(capacity=lambda now: 1 if 10 < now < 70 else 64, calls=12_000)
    assert min(limits[10:70]) <= 30
    assert limits[-2] >= 48
    assert seconds < 200


@pytest.mark.parametrize("seed", range(3))
def test_refusals_that_remain_after_a_cut_are_the_background_and_are_logged_once(seed, caplog):
    best, _ = play(calls=30_000, latency=0.2)
    seconds, limits = play(calls=30_000, latency=0.2, refuse=0.03, seed=seed)
    assert seconds < 1.15 * best
    assert sum(limits[50:]) / len(limits[50:]) > 60
    (message,) = caplog.messages
    assert "of the calls are refused (HTTP 429), also with fewer calls in flight" in message


def test_refusals_during_an_outage_are_not_the_background(caplog):
    _, limits = play(capacity=lambda now: 0 if 30 < now < 90 else 64, calls=12_000)
    assert limits[28] == 64
    assert 64 * CUT**5 <= limits[88] <= 64 * CUT**3
    assert limits[-2] == 64
    assert not caplog.messages


def test_the_background_has_a_maximum():
    adaptive = AdaptiveConcurrency()
    adaptive.background = MAX_BACKGROUND
    refuse_share(adaptive, 0.6, 0.0)  # a cut
    refuse_share(adaptive, 0.3, COOL_DOWN_S)  # fewer refusals, but more than any background
    assert adaptive.background <= MAX_BACKGROUND
