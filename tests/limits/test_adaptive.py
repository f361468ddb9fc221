from hypothesis import given
from hypothesis import strategies as st

from reward_loop.limits.limiter import COOL_DOWN_S, CUT, INITIAL, AdaptiveConcurrency


def a_round(adaptive, now=0.0):
    for _ in range(adaptive.calls):
        adaptive.answered(now, adaptive.calls)


def test_the_limit_doubles_until_the_first_refusal_and_then_grows_slowly():
    adaptive = AdaptiveConcurrency()
    assert adaptive.calls == INITIAL
    a_round(adaptive)
    a_round(adaptive)
    assert adaptive.calls == 4 * INITIAL
    adaptive.refused(0.0)
    cut = adaptive.calls
    assert cut == int(4 * INITIAL * CUT)
    a_round(adaptive, COOL_DOWN_S)
    assert cut < adaptive.calls <= cut * 1.05 + 1


def test_refusals_of_one_burst_cut_the_limit_once_and_pause_its_growth():
    adaptive = AdaptiveConcurrency()
    for _ in range(10):
        adaptive.refused(1.0)
    assert adaptive.calls == INITIAL * CUT
    a_round(adaptive, 2.0)
    assert adaptive.calls == INITIAL * CUT
    adaptive.refused(1.0 + COOL_DOWN_S)
    assert adaptive.calls == int(INITIAL * CUT * CUT)


def test_retry_after_is_obeyed_and_lengthens_the_cool_down():
    adaptive = AdaptiveConcurrency()
    adaptive.refused(0.0, retry_after=100)
    assert adaptive.not_before == 100
    adaptive.refused(50.0, retry_after=10)
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
            adaptive.refused(now)
        else:
            a_round(adaptive, now)
        assert 1 <= adaptive.calls <= maximum
