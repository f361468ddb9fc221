import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.agent.filter_forecast import FilterForecast

COUNTS = st.integers(0, 300)


def forecast(kept: int = 0, filtered: int = 0, most: int = 10**6) -> FilterForecast:
    made = FilterForecast(most)
    made.count(kept=kept, filtered=filtered)
    return made


def test_the_share_follows_the_groups_of_the_last_steps():
    made = forecast()
    assert made.share == 0
    for _ in range(20):
        made.count(kept=100, filtered=300)
        made.end_step()
    assert made.share == pytest.approx(0.75, abs=0.01)
    shares = []
    for _ in range(8):
        made.count(kept=100, filtered=0)
        made.end_step()
        shares.append(made.share)
    assert shares == sorted(shares, reverse=True)
    assert shares[3] < 0.5
    assert shares[-1] < 0.25


def test_before_any_group_is_filtered_no_prompts_are_begun_in_their_place():
    assert forecast(kept=50).missing(8, kept=0, pending=0) == 8
    assert forecast().missing(8, kept=3, pending=2) == 3
    assert forecast().missing(8, kept=3, pending=5) == 0
    assert forecast().missing(8, kept=3, pending=5, later=8) == 8
    assert forecast().missing(8, kept=10, pending=0, later=8) == 6


def test_with_half_of_the_groups_filtered_twice_as_many_prompts_are_begun_and_a_margin():
    half = forecast(kept=10_000, filtered=10_000)
    begun = half.missing(32, kept=0, pending=0)
    assert begun / 2 - 2 * (begun / 4) ** 0.5 == pytest.approx(32, abs=0.5)
    # For the next step, two deviations fewer than it needs.
    later = half.missing(32, kept=32, pending=0, later=32)
    assert later / 2 + 2 * (later / 4) ** 0.5 == pytest.approx(32, abs=0.5)
    assert half.missing(32, kept=0, pending=0, later=32) == pytest.approx(64 + later, abs=1)
    assert half.missing(32, kept=42, pending=5, later=32) < later - 10


@given(
    wanted=st.integers(1, 300), kept=COUNTS, pending=COUNTS, later=COUNTS, most=COUNTS, passed=COUNTS, filtered=COUNTS
)
def test_the_bound_holds_and_a_step_always_gets_its_groups(wanted, kept, pending, later, most, passed, filtered):
    begun = forecast(passed, filtered, most).missing(wanted, kept=kept, pending=pending, later=later)
    assert begun >= 0
    assert begun == 0 or kept + pending + begun <= wanted + later + most
    # Otherwise the trainer would wait for ever.
    assert kept + pending + begun >= wanted
