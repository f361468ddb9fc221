from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.verl.reward_metrics import judging_s, overlap_metrics


def served(arrivals: list[float], latencies: list[float], places: int) -> list[tuple[float, float]]:
    """Judges that work on so many samples at a time, first come, first served."""
    free = [0.0] * places
    judged = []
    for arrival, latency in zip(arrivals, latencies, strict=True):
        end = max(arrival, heapq.heappop(free)) + latency
        heapq.heappush(free, end)
        judged.append((arrival, end))
    return judged


def test_without_a_queue_judging_takes_as_long_as_the_slowest_reward() -> None:
    latencies = [1.0] * 30 + [9.0]
    assert judging_s(served([5.0] * 31, latencies, places=31)) == 9
    # Rewards were out for 16.5 s, because rollouts came one after the other.
    assert judging_s(served([i / 4 for i in range(31)], latencies, places=31)) == 9


@pytest.mark.parametrize("arriving_s", [0.0, 8.0])
def test_with_a_queue_judging_takes_as_long_as_the_judges_need_for_all(arriving_s: float) -> None:
    draw = random.Random(1)
    latencies = [draw.uniform(0.1, 0.4) for _ in range(512)]
    arrivals = sorted(draw.uniform(0, arriving_s) for _ in latencies)
    assert judging_s(served(arrivals, latencies, places=8)) == pytest.approx(sum(latencies) / 8, rel=0.1)


def test_judging_is_not_longer_than_the_rewards_that_arrived_were_out() -> None:
    assert judging_s([]) == 0
    assert judging_s([(4, 12), (22, 23)]) == 9  # the two were never out at the same time
    # Two bursts of three rewards at a high rate, with a gap in which no reward was out: half of the rewards took 100 s
    # to arrive, because nothing was requested in the gap.
    bursts = [(start, start + 1 + number / 10) for start in (0.0, 100.0) for number in range(3)]
    assert judging_s(bursts) == pytest.approx(2 * 1.2)


def test_a_reward_that_was_out_before_the_step_is_hidden_for_that_time() -> None:
    metrics = overlap_metrics(3, generation=0.2, waiting=1.69, judged=[(0, 3.01)])
    assert metrics["reward_pipeline/judging_s"] == pytest.approx(3.01)
    assert metrics["reward_pipeline/hidden_share"] == pytest.approx(1 - 1.69 / 3.01)
    # The floor of a step is not longer than the step.
    assert metrics["reward_pipeline/floor_s"] == pytest.approx(3)
    assert metrics["reward_pipeline/over_floor"] == pytest.approx(0)


def test_the_metrics_of_a_step_by_hand() -> None:
    metrics = overlap_metrics(10, generation=3, waiting=1, judged=[(0, 4)])
    assert metrics == {
        "reward_pipeline/generation_s": 3,
        "reward_pipeline/judging_s": 4,
        "reward_pipeline/pending_s": 4,
        "reward_pipeline/training_s": 6,
        "reward_pipeline/waiting_for_rewards_s": 1,
        "reward_pipeline/waiting_share": pytest.approx(0.1),
        "reward_pipeline/hidden_share": pytest.approx(0.75),
        "reward_pipeline/floor_s": 9,
        "reward_pipeline/over_floor": pytest.approx(1 / 9),
    }
    judging_takes_longest = overlap_metrics(22, generation=3, waiting=13, judged=[(0, 20)])
    assert judging_takes_longest["reward_pipeline/floor_s"] == 20
    assert judging_takes_longest["reward_pipeline/over_floor"] == pytest.approx(0.1)
    assert judging_takes_longest["reward_pipeline/hidden_share"] == pytest.approx(0.35)


seconds = st.just(0.0) | st.floats(min_value=1e-3, max_value=1e6)


@given(seconds, seconds, seconds, seconds)
def test_shares_stay_between_0_and_1(generation: float, waiting: float, training: float, judging: float) -> None:
    step = generation + waiting + training
    metrics = overlap_metrics(step, generation=generation, waiting=waiting, judged=[(0, judging)])
    assert all(math.isfinite(value) for value in metrics.values())
    assert ("reward_pipeline/hidden_share" in metrics) is (judging > 0)  # nothing was pending
    assert 0 <= metrics.get("reward_pipeline/hidden_share", 0) <= 1
    assert 0 <= metrics["reward_pipeline/waiting_share"] <= 1 + 1e-9
