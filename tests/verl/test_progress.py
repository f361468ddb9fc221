from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.verl.progress import Event, Progress, StepTimes


def told(*events: tuple[float, Event], uids: str = "") -> Progress:
    progress = Progress()
    progress.submit(uids)
    for at, event in events:
        progress.happened(event, at)
    return progress


def test_a_prompt_is_generated_before_it_is_over() -> None:
    progress = told((1, ("generated", "a")), (2, ("over", "b")), uids="abc")
    assert progress.generating == {"c"}
    assert progress.unfinished == {"a", "c"}
    progress.forget("ac")
    assert not progress.generating | progress.unfinished


def test_pending_rewards_are_counted_and_the_most_of_a_step_remembered() -> None:
    progress = told((1, ("judging", "a")), (1, ("judging", "b")), (2, ("judged", "a")))
    assert (progress.pending, progress.most_pending) == (1, 2)
    progress.start_step(2)
    assert progress.most_pending == 1
    progress.happened(("judged", "b"), 3)
    assert (progress.pending, progress.most_pending, progress.events) == (0, 1, 4)


def test_the_oldest_reward_is_that_of_the_prompt_which_waits_longest() -> None:
    progress = told((1, ("judging", "a")), (2, ("judging", "b")), (4, ("judging", "b")), (5, ("judged", "b")))
    assert progress.oldest(7) == 6
    progress.happened(("judged", "a"), 8)
    assert progress.oldest(9) == 7
    progress.happened(("judged", "b"), 10)
    assert progress.oldest(11) == 0


def test_judging_lasts_from_the_first_sample_to_the_last_reward() -> None:
    progress = told(
        *((10, ("judging", "a")), (11, ("judging", "b")), (13, ("judged", "b")), (18, ("judged", "a"))),
    )
    assert progress.judging_s(20) == 8


def test_judging_does_not_last_while_nothing_is_out() -> None:
    progress = told(
        *((0, ("judging", "a")), (1, ("judging", "a")), (2, ("judged", "a")), (3, ("judged", "a"))),
        *((10, ("judging", "b")), (11, ("judged", "b")), (12, ("judging", "a")), (13, ("judged", "a"))),
    )
    assert progress.judging_s(20) == 3 + 1 + 1


def test_judging_that_goes_on_belongs_to_the_steps_in_which_it_goes_on() -> None:
    progress = told((4, ("judging", "a")), (5, ("judging", "b")))
    assert progress.judging_s(7) == 3
    progress.start_step(10)
    assert progress.judging_s(10) == 0
    progress.happened(("judged", "a"), 11)
    assert progress.judging_s(12) == 2
    progress.happened(("judged", "b"), 14)
    assert progress.judging_s(20) == 4
    progress.start_step(20)
    assert progress.judging_s(30) == 0


def test_what_was_thrown_out_is_judged_to_its_end() -> None:
    progress = told((1, ("judging", "a")), uids="a")
    progress.forget("a")
    progress.happened(("judged", "a"), 2)
    progress.happened(("over", "a"), 2)
    assert progress.pending == 0
    assert progress.judging_s(9) == 1


def test_the_metrics_of_a_step_by_hand() -> None:
    metrics = StepTimes(step=10, generation=3, waiting=1, training=6, judging=4).metrics()
    assert metrics == {
        "reward_pipeline/generation_s": 3,
        "reward_pipeline/judging_s": 4,
        "reward_pipeline/training_s": 6,
        "reward_pipeline/waiting_for_rewards_s": 1,
        "reward_pipeline/waiting_share": pytest.approx(0.1),
        "reward_pipeline/hidden_share": pytest.approx(0.75),
        "reward_pipeline/floor_s": 9,
        "reward_pipeline/over_floor": pytest.approx(1 / 9),
    }
    judging_takes_longest = StepTimes(step=22, generation=3, waiting=13, training=6, judging=20).metrics()
    assert judging_takes_longest["reward_pipeline/floor_s"] == 20
    assert judging_takes_longest["reward_pipeline/over_floor"] == pytest.approx(0.1)
    assert judging_takes_longest["reward_pipeline/hidden_share"] == pytest.approx(0.35)


seconds = st.just(0.0) | st.floats(min_value=1e-3, max_value=1e6)


@given(seconds, seconds, seconds, seconds)
def test_shares_stay_between_0_and_1(generation: float, waiting: float, training: float, judging: float) -> None:
    metrics = StepTimes(generation + waiting + training, generation, waiting, training, judging).metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 <= metrics["reward_pipeline/hidden_share"] <= 1
    assert 0 <= metrics["reward_pipeline/waiting_share"] <= 1 + 1e-9
