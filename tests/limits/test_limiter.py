import heapq
import itertools
from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from reward_loop.config import LimitConfig
from reward_loop.limits.limiter import PERIOD_S, Limiter
from tests.limits.asking import asking

CALLS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.1, 100), st.integers(0, 60), st.sampled_from(["train", "validate"])),
    min_size=1,
    max_size=60,
)


def drive(limiter, calls):
    """Play calls (gap before it, seconds, tokens, traffic_class) in virtual time; returns their beginnings and ends."""
    now, order, events, spans, permits = 0.0, itertools.count(), [], {}, {}

    def begins(number, seconds):
        def admit():
            spans[number] = (now, now + seconds)
            heapq.heappush(events, (now + seconds, next(order), "end", number))

        return admit

    arrival = 0.0
    for number, (gap, seconds, tokens, traffic_class) in enumerate(calls):
        arrival += gap
        permits[number] = asking(tokens, traffic_class, begins(number, seconds))
        heapq.heappush(events, (arrival, next(order), "arrive", number))
    while events:
        now, _, what, number = heapq.heappop(events)
        if what == "arrive":
            limiter.enter(now, permits[number])
        elif what == "end":
            limiter.leave(now)
        again = limiter.advance(now)
        if again is not None:
            heapq.heappush(events, (again, next(order), "look", -1))
    return spans


@given(CALLS, st.integers(1, 5), st.integers(1, 10), st.integers(60, 120))
def test_all_limits_hold_and_every_call_gets_its_turn(calls, concurrent, requests, tokens):
    config = LimitConfig(max_concurrent=concurrent, requests_per_minute=requests, tokens_per_minute=tokens)
    spans = drive(Limiter("judge", config), calls)
    assert sorted(spans) == list(range(len(calls)))
    for begin, _ in spans.values():
        assert sum(b <= begin < e for b, e in spans.values()) <= concurrent
    begins = sorted((begin, calls[number][2]) for number, (begin, _) in spans.items())
    times = [time for time, _ in begins]
    for i, time in enumerate(times):
        window = begins[i : bisect_left(times, time + PERIOD_S)]
        assert len(window) <= requests
        assert sum(amount for _, amount in window) <= tokens


@given(CALLS)
def test_each_traffic_class_is_served_in_order(calls):
    spans = drive(Limiter("judge", LimitConfig(max_concurrent=2, requests_per_minute=5)), calls)
    for traffic_class in ("train", "validate"):
        begins = [spans[number][0] for number, call in enumerate(calls) if call[3] == traffic_class]
        assert begins == sorted(begins)


def test_training_and_validation_take_turns():
    limiter, order = Limiter("judge", LimitConfig(max_concurrent=1)), []
    permits = {}
    for name in ("t1", "t2", "t3", "t4", "v1", "v2"):
        traffic_class = "train" if name[0] == "t" else "validate"
        permits[name] = asking(0, traffic_class, lambda name=name: order.append(name))
        limiter.enter(0.0, permits[name])
    while len(order) < len(permits):
        limiter.leave(0.0)
        limiter.advance(0.0)
    assert order == ["t1", "t2", "v1", "t3", "v2", "t4"]


def test_an_abandoned_permit_is_passed_over():
    limiter, order = Limiter("judge", LimitConfig(max_concurrent=1)), []
    permits = [asking(0, "train", lambda i=i: order.append(i)) for i in range(3)]
    for permit in permits:
        limiter.enter(0.0, permit)
    permits[1].request.cancel()
    limiter.leave(0.0)
    limiter.advance(0.0)
    assert order == [0, 2]
    assert (limiter.in_flight, limiter.waiting) == (1, 0)


def test_limits_can_be_changed_while_calls_are_in_flight():
    limiter, order = Limiter("judge", LimitConfig(max_concurrent=1)), []
    permits = [asking(0, "train", lambda i=i: order.append(i)) for i in range(4)]
    for permit in permits:
        limiter.enter(0.0, permit)
    limiter.configure(LimitConfig(max_concurrent=3))
    limiter.advance(0.0)
    assert order == [0, 1, 2]
    limiter.configure(LimitConfig(max_concurrent=1))
    limiter.leave(0.0)
    limiter.advance(0.0)
    assert order == [0, 1, 2]
    # What was counted before there was a limit counts.
    limiter.configure(LimitConfig(requests_per_minute=4, burst_seconds=60))
    assert limiter.advance(1.0) is None
    assert order == [0, 1, 2, 3]
    late = asking(0, "train", lambda: order.append("late"))
    limiter.enter(2.0, late)
    assert limiter.advance(2.0) > PERIOD_S


def test_real_usage_takes_the_place_of_the_estimate():
    limiter, order = Limiter("judge", LimitConfig(tokens_per_minute=100, burst_seconds=60)), []
    permits = [asking(80, "train", lambda i=i: order.append(i)) for i in range(2)]
    for permit in permits:
        limiter.enter(0.0, permit)
    assert order == [0]
    limiter.used(0.0, permits[0].permit, 20)
    limiter.advance(0.0)
    assert order == [0, 1]


def test_the_retry_after_of_an_overloaded_service_holds_back_all_calls_of_an_adaptive_limit():
    limiter, order = Limiter("judge", LimitConfig(adaptive=True)), []
    permits = [asking(0, "train", lambda i=i: order.append(i)) for i in range(30)]
    for permit in permits:
        limiter.enter(0.0, permit)
    assert len(order) == 20
    for _ in range(10):
        limiter.leave(0.0, False, 7)
    for _ in range(10):
        limiter.leave(1.0)
    assert limiter.advance(1.0) == 7
    limiter.advance(7.0)
    assert len(order) == 30
