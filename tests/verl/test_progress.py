from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.verl.progress import GENERATED, Event, Progress, overlap_metrics


def told(*events: tuple[float, Event], uids: str = "") -> Progress:
    progress = Progress()
    progress.submit(uids)
    for at, event in events:
        progress.record(event, at)
    return progress


def test_a_prompt_is_generated_then_published_then_over() -> None:
    progress = told((1, ("generated", "a")), (2, ("published", "b")), (3, ("over", "c")), uids="abcd")
    assert progress.generating == {"d"}
    assert progress.unpublished == {"a", "d"}
    assert progress.unfinished == {"a", "b", "d"}
    progress.forget("abd")
    assert not progress.generating | progress.unpublished | progress.unfinished


def test_tags_complete_the_events_that_are_missing() -> None:
    progress = told(uids="abcd")
    running = {"status": "running"}
    progress.record_tags({"a": {"status": "failure"}, "b": running | {GENERATED: True}, "c": running, "z": running}, 1)
    assert progress.unfinished == {"b", "c", "d"}
    assert progress.unpublished == {"c", "d"}
    assert progress.events == 2
    progress.record_tags({"a": {"status": "failure"}, "b": running | {GENERATED: True}}, 2)
    assert progress.events == 2


def test_the_pending_rewards_of_a_dead_worker_are_removed() -> None:
    progress = told((1, ("judging", "a_0")), (2, ("judging", "b_0")), (3, ("judging", "b_11")), uids="ab")
    progress.restart({"b", "z"})
    assert progress.metrics(5) == {
        "reward_pipeline/rewards_pending": 1,
        "reward_pipeline/rewards_pending_max": 3,
        "reward_pipeline/oldest_reward_s": 4,
    }
    progress.record(("judged", "a_0"), 6)
    assert progress.pending == 0


def test_the_unfinished_prompts_of_a_dead_worker_are_generated_again_unless_their_tags_show_more() -> None:
    progress = told((1, ("published", "a")), (2, ("published", "b")), (3, ("over", "c")), uids="abcd")
    # The training progress does not contain prompts of a validation, such as `v`, and would wait for them indefinitely.
    progress.restart({"a", "b", "c", "v"})
    assert progress.generating == progress.unfinished == {"a", "b", "d"}
    progress.record_tags({"a": {"status": "pending", GENERATED: False}, "b": {"status": "finished"}}, 4)
    assert progress.generating == progress.unfinished == {"a", "d"}


def test_the_latest_failure_is_remembered_and_ends_nothing() -> None:
    progress = told((1, ("failed", "a_0: KeyError: 'x'")), uids="a")
    assert progress.failure == "a_0: KeyError: 'x'"
    assert progress.generating == progress.unfinished == {"a"}


def test_pending_rewards_are_counted_and_the_most_of_a_step_remembered() -> None:
    progress = told((1, ("judging", "a_0")), (1, ("judging", "b_0")), (2, ("judged", "a_0")))
    assert (progress.pending, progress.most_pending) == (1, 2)
    progress.start_step()
    assert progress.most_pending == 1
    progress.record(("judged", "b_0"), 3)
    assert (progress.pending, progress.most_pending, progress.events) == (0, 1, 4)


def test_the_oldest_reward_is_the_one_that_has_been_out_for_longest() -> None:
    progress = told((1, ("judging", "a_0")), (2, ("judging", "a_1")), (4, ("judging", "b_0")), (5, ("judged", "b_0")))
    assert progress.oldest(7) == 6
    progress.record(("judged", "a_0"), 8)
    assert progress.oldest(9) == 7
    progress.record(("judged", "a_1"), 10)
    assert progress.oldest(11) == 0


def served(arrivals: list[float], latencies: list[float], places: int) -> Progress:
    """Judges that work on so many samples at a time, first come, first served."""
    free = [0.0] * places
    events: list[tuple[float, Event]] = []
    for number, (arrival, latency) in enumerate(zip(arrivals, latencies, strict=True)):
        end = max(arrival, heapq.heappop(free)) + latency
        heapq.heappush(free, end)
        events += [(arrival, ("judging", f"a_{number}")), (end, ("judged", f"a_{number}"))]
    return told(*sorted(events, key=lambda event: event[0]))


def test_without_a_queue_judging_takes_as_long_as_the_slowest_reward() -> None:
    latencies = [1.0] * 30 + [9.0]
    together = served([5.0] * 31, latencies, places=31)
    assert together.judging_s() == 9
    # Rewards were out for 16.5 s, because rollouts came one after the other.
    trickling = served([i / 4 for i in range(31)], latencies, places=31)
    assert trickling.judging_s() == 9


@pytest.mark.parametrize("arriving_s", [0.0, 8.0])
def test_with_a_queue_judging_takes_as_long_as_the_judges_need_for_all(arriving_s: float) -> None:
    draw = random.Random(1)
    latencies = [draw.uniform(0.1, 0.4) for _ in range(512)]
    arrivals = sorted(draw.uniform(0, arriving_s) for _ in latencies)
    progress = served(arrivals, latencies, places=8)
    assert progress.judging_s() == pytest.approx(sum(latencies) / 8, rel=0.1)


def test_judging_counts_in_the_step_in_which_the_reward_arrives_with_all_its_seconds() -> None:
    progress = told((4, ("judging", "a_0")), (5, ("judging", "b_0")), (6, ("judged", "b_0")))
    assert progress.judging_s() == 1
    progress.start_step()
    assert progress.judging_s() == 0
    progress.record(("judged", "a_0"), 12)
    assert progress.judging_s() == 8
    progress.record(("judging", "b_1"), 22)
    progress.record(("judged", "b_1"), 23)
    assert progress.judging_s() == 9  # the two were never out at the same time
    progress.start_step()
    assert progress.judging_s() == 0


def test_judging_is_not_longer_than_the_rewards_that_arrived_were_out() -> None:
    # Two bursts of three rewards at a high rate, with a gap in which no reward was out.
    progress = Progress()
    for start in (0.0, 100.0):
        for number in range(3):
            progress.record(("judging", f"{start}_{number}"), start)
        for number in range(3):
            progress.record(("judged", f"{start}_{number}"), start + 1 + number / 10)
    # Half of the rewards took 100 s to arrive, because nothing was requested in the gap.
    assert progress.judging_s() == pytest.approx(2 * 1.2)


def test_a_reward_that_was_out_before_the_step_is_hidden_for_that_time() -> None:
    progress = told((0, ("judging", "a_0")))
    progress.start_step()
    progress.record(("judged", "a_0"), 3.01)
    metrics = overlap_metrics(3, generation=0.2, waiting=1.69, judging=progress.judging_s())
    assert metrics["reward_pipeline/judging_s"] == pytest.approx(3.01)
    assert metrics["reward_pipeline/hidden_share"] == pytest.approx(1 - 1.69 / 3.01)
    # The floor of a step is not longer than the step.
    assert metrics["reward_pipeline/floor_s"] == pytest.approx(3)
    assert metrics["reward_pipeline/over_floor"] == pytest.approx(0)


def test_a_reward_of_a_forgotten_prompt_still_ends_its_judging() -> None:
    progress = told((1, ("judging", "a_0")), uids="a")
    progress.forget("a")
    progress.record(("judged", "a_0"), 2)
    progress.record(("over", "a"), 2)
    assert progress.pending == 0
    assert progress.judging_s() == 1


def test_the_metrics_of_a_step_by_hand() -> None:
    metrics = overlap_metrics(10, generation=3, waiting=1, judging=4)
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
    judging_takes_longest = overlap_metrics(22, generation=3, waiting=13, judging=20)
    assert judging_takes_longest["reward_pipeline/floor_s"] == 20
    assert judging_takes_longest["reward_pipeline/over_floor"] == pytest.approx(0.1)
    assert judging_takes_longest["reward_pipeline/hidden_share"] == pytest.approx(0.35)


seconds = st.just(0.0) | st.floats(min_value=1e-3, max_value=1e6)


@given(seconds, seconds, seconds, seconds)
def test_shares_stay_between_0_and_1(generation: float, waiting: float, training: float, judging: float) -> None:
    step = generation + waiting + training
    metrics = overlap_metrics(step, generation=generation, waiting=waiting, judging=judging)
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 <= metrics["reward_pipeline/hidden_share"] <= 1
    assert 0 <= metrics["reward_pipeline/waiting_share"] <= 1 + 1e-9
