import asyncio
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.scoring import Comparison, compare_all, order_flips, ranking, tournament, win_rates


class Judge:
    """The larger number wins; ``favour`` is what the first place is given on top."""

    def __init__(self, favour=0):
        self.favour = favour
        self.asked = []

    async def __call__(self, first, second):
        self.asked.append((first, second))
        await asyncio.sleep(0)
        difference = first + self.favour - second
        return 0.5 if difference == 0 else float(difference > 0)


async def test_everyone_meets_everyone_in_both_orders():
    judge = Judge()
    assert await tournament([3, 1, 2], judge) == [1.0, 0.0, 0.5]
    pairs = list(combinations([3, 1, 2], 2))
    assert sorted(judge.asked) == sorted(pairs + [(b, a) for a, b in pairs])


async def test_a_judge_that_favours_a_place_makes_draws():
    assert await tournament([1, 2], Judge(favour=10)) == [0.5, 0.5]
    assert await tournament([1, 2], Judge(favour=10), swap=False) == [1.0, 0.0]


@given(st.integers(2, 20), st.integers(1, 20))
def test_each_response_has_the_configured_number_of_opponents(count, opponents):
    judge = Judge()
    asyncio.run(tournament(list(range(count)), judge, swap=False, opponents=opponents))
    assert len(judge.asked) == len({frozenset(pair) for pair in judge.asked})
    met = [sum(i in pair for pair in judge.asked) for i in range(count)]
    assert set(met) == {min(opponents + opponents % 2, count - 1)}


@pytest.mark.parametrize("count", range(3, 12))
async def test_in_a_circle_each_response_is_shown_first_once_and_second_once(count):
    compared = await compare_all(list(range(count)), Judge(), swap=False, opponents=2)
    assert sorted(one.first for one in compared) == sorted(one.second for one in compared) == list(range(count))


@given(st.integers(2, 20), st.integers(2, 20))
def test_in_one_order_each_response_is_shown_first_about_as_often_as_second(count, opponents):
    compared = asyncio.run(compare_all(list(range(count)), Judge(), swap=False, opponents=opponents))
    for index in range(count):
        first = sum(one.first == index for one in compared)
        assert abs(first - sum(one.second == index for one in compared)) <= 1


async def test_order_flips_are_the_share_of_pairs_that_the_order_decides():
    compared = await compare_all([1, 2, 9], Judge(favour=2))  # only 1 and 2 are near enough
    assert order_flips(3, compared) == [0.5, 0.5, 0.0]
    assert win_rates(3, compared) == [0.25, 0.25, 1.0]
    assert order_flips(2, await compare_all([1, 2], Judge(), swap=False)) == [None, None]


def test_a_draw_or_a_missing_verdict_in_one_order_is_no_flip():
    assert order_flips(2, [Comparison(0, 1, 1.0), Comparison(1, 0, 0.5)]) == [0.0, 0.0]
    assert order_flips(2, [Comparison(0, 1, 1.0), Comparison(1, 0, None)]) == [None, None]


async def test_verdicts_that_cannot_be_read_do_not_count():
    async def judge(first, second):
        return None if "?" in (first, second) else float(first > second)

    assert await tournament(["a", "?", "b"], judge) == [0.0, None, 1.0]
    assert await tournament(["a"], judge) == [None]
    assert await tournament([], judge) == []


@pytest.mark.parametrize("returned", [2, -0.1, "A", float("nan")])
async def test_other_answers_are_refused(returned):
    async def judge(first, second):
        return returned

    with pytest.raises(ValueError, match="from 0"):
        await tournament(["a", "b"], judge)


async def test_an_error_cancels_the_others():
    cancelled = []

    async def judge(first, second):
        if first == "a" and second == "b":
            raise ConnectionError("429")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append((first, second))
            raise

    with pytest.raises(ConnectionError, match="429"):
        await tournament(["a", "b", "c"], judge)
    assert len(cancelled) == 5


def test_rankings():
    assert ranking([2, 0, 1]) == [0.5, 0.0, 1.0]
    assert ranking([0]) == [1.0]
    assert ranking([]) == []
    for wrong in ([0, 0], [1, 2], [0, 2]):
        with pytest.raises(ValueError, match="once"):
            ranking(wrong)
