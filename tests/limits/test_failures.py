import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop import Outcome, RewardResult, TooManyFailuresError
from reward_loop.managers import FailureBound

SCORED = RewardResult(Outcome.SCORED, 1.0)
UNSCORED = RewardResult(Outcome.UNSCORED, None)
FAILED = RewardResult(Outcome.FAILED, None, error="sample u7: compute_score (reward.py) raised KeyError: 'x'")


def test_the_message_shows_samples_causes_and_what_to_do():
    bound = FailureBound(0.5, 6)
    where = "at line 7\n    raise"
    for i in range(3):
        bound.add(True, f"sample u{i}: judge (r.py) raised TimeoutError: {where}", None)
    bound.add(True, "sample u3: judge (r.py) raised KeyError: 'x'", None)
    bound.add(True, "sample u4: judge (r.py) raised KeyError: 'x'", None)
    with pytest.raises(TooManyFailuresError) as stop:
        bound.add(True, "sample u5: judge (r.py) returned 'good'", None)
    assert str(stop.value) == (
        "6 of the last 6 samples failed, more than the share of 0.5 that max_failed_share allows. The latest failure "
        "of each cause:\n"
        "- sample u5: judge (r.py) returned 'good'\n"
        "- sample u4: judge (r.py) raised KeyError: 'x'\n"
        "- sample u2: judge (r.py) raised TimeoutError: at line 7\n    raise\n"
        "Try the function on a few rows with `reward-loop check`. If this many failures are expected, raise "
        "max_failed_share (in a verl run reward_loop.max_failed_share, with a command -O max_failed_share)."
    )


@given(st.lists(st.sampled_from([SCORED, UNSCORED, FAILED]), max_size=60), st.integers(1, 20), st.integers(1, 20))
def test_the_share_of_failed_samples_in_the_window_stops_the_run(results, min_samples, window):
    bound = FailureBound(0.5, min_samples, window)
    for seen, result in enumerate(results, start=1):
        latest = results[max(0, seen - max(window, min_samples)) : seen]
        stops = result is FAILED and len(latest) >= min_samples and latest.count(FAILED) > 0.5 * len(latest)
        try:
            bound.add(result is FAILED, result.error, None)
        except TooManyFailuresError:
            assert stops
        else:
            assert not stops
