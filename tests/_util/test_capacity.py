import math
import random
from collections import deque

import pytest

from reward_loop._util.capacity import LearnedCapacity


def play(capacity, *, calls=2000, at_random=0.0, seed=0):
    """Send calls to a server that takes `capacity(call)` at a time, as many as there are places; refused ones again.

    Return the refused requests after the first burst, and the largest number of requests in flight at each answer.
    """
    rng, places = random.Random(seed), LearnedCapacity()
    waiting, sent, running, answered, refused, levels = calls, deque(), 0, 0, 0, []
    while answered < calls:
        while waiting and places.has_free:
            waiting -= 1
            places.begin()
            sent.append(None)
        while sent:
            sent.popleft()
            if running < capacity(answered) and rng.random() >= at_random:
                running += 1
                continue
            assert places.refused() or not running
            places.end(answered=False)
            waiting += 1
            refused += answered > 0
        if running:
            running, answered = running - 1, answered + 1
            places.end(answered=True)
            levels.append(running + 1)
        assert places.in_flight == running
    return refused, levels


@pytest.mark.parametrize("capacity", [1, 8, 100])
def test_the_places_of_a_full_server_are_used_and_few_requests_are_refused(capacity):
    refused, levels = play(lambda answered: capacity)
    assert refused < 2000 / capacity + 10
    late = levels[500:-capacity]
    assert sum(late) / len(late) > 0.95 * capacity


def test_more_places_are_found_again():
    _, levels = play(lambda answered: 4 if answered < 300 else 64, calls=3000)
    assert max(levels[:300]) == 4
    assert max(levels[1500:]) == 64


@pytest.mark.parametrize("seed", range(3))
def test_refusals_at_random_do_not_take_the_places_away(seed):
    _, levels = play(lambda answered: 64, calls=10_000, at_random=0.02, seed=seed)
    late = levels[1000:-64]
    assert sum(late) / len(late) > 48


def test_a_server_that_refuses_without_other_requests_is_not_full():
    places = LearnedCapacity()
    assert places.number == math.inf
    for _ in range(5):
        places.begin()
        assert not places.refused()
        places.end(answered=False)
    assert places.has_free
