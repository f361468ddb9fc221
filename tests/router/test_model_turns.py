"""The turns of models that share GPUs: the state machine, with times that the tests choose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reward_loop.router.model_turns import EXPECTED_S, IDLE_S, TURN_S, Turns


def asleep(*models: str) -> Turns:
    return Turns(models or ("a", "b"))


def awake(model: str, *models: str) -> Turns:
    turns = asleep(*models)
    turns.wake(model, -10)
    return turns


def test_no_model_is_woken_up_before_it_is_asked_for() -> None:
    turns = asleep()
    assert turns.next(0) is None
    assert not turns.admits("a", 0)
    turns.wait("b", "request", 0)
    assert turns.next(0) == "b"


def test_a_model_that_wakes_up_gets_all_that_wait_for_it_and_no_others() -> None:
    turns = asleep()
    for waiter in (1, 2):
        turns.wait("a", waiter, 0)
    turns.wait("b", 3, 0)
    assert turns.released(0) == []
    turns.wake("a", 0)
    assert turns.released(0) == [1, 2]
    assert turns.released(0) == []
    assert (turns.admits("a", 0), turns.admits("b", 0)) == (True, False)


def test_a_model_stays_awake_while_no_other_is_asked_for() -> None:
    turns = awake("a")
    assert turns.next(1e6) is None
    turns.wait("a", "late", 1e6)
    assert turns.released(1e6) == ["late"]
    assert turns.next(1e6) is None


def test_the_next_model_wakes_up_when_the_one_before_has_nothing_in_flight() -> None:
    turns = awake("a")
    turns.begin()
    turns.begin()
    turns.wait("b", "request", 0)
    assert turns.next(1) is None
    assert turns.admits("a", 1)
    turns.end(1)
    assert turns.next(1 + IDLE_S) is None
    turns.end(2)
    assert turns.next(2) is None  # the next request may follow
    assert turns.next(2 + IDLE_S) == "b"


def test_requests_that_waited_are_expected_for_a_while() -> None:
    turns = asleep()
    for waiter in (1, 2):
        turns.wait("a", waiter, 0)
    turns.wait("b", 3, 0)
    turns.wake("a", 0)
    turns.released(0)
    assert turns.next(1) is None
    turns.begin()
    turns.end(1)
    assert turns.next(2) is None  # the second one
    turns.begin()
    turns.end(2)
    assert turns.next(3) == "b"


def test_a_client_that_never_comes_does_not_keep_the_model_awake() -> None:
    turns = asleep()
    turns.wait("a", 1, 0)
    turns.wait("b", 2, 0)
    turns.wake("a", 0)
    turns.released(0)
    assert turns.next(EXPECTED_S - 1) is None
    assert turns.next(EXPECTED_S) == "b"


def test_a_request_that_no_longer_waits_wakes_nothing_up() -> None:
    turns = awake("a")
    turns.wait("b", "request", 0)
    turns.give_up("b", "request")
    turns.give_up("b", "request")
    assert turns.next(0) is None


def test_the_model_whose_request_has_waited_longest_is_the_next() -> None:
    turns = awake("a", "a", "b", "c")
    turns.wait("c", 1, 1)
    for waiter in (2, 3, 4):
        turns.wait("b", waiter, 2)
    assert turns.next(3) == "c"


def test_a_wait_that_began_earlier_comes_first_whenever_it_is_recorded() -> None:
    turns = awake("a", "a", "b", "c")
    turns.wait("b", 1, 2)
    turns.wait("c", 2, 3)
    turns.wait("c", 3, 1)  # it waited at a router that was restarted
    assert turns.next(4) == "c"
    turns.give_up("c", 3)
    assert turns.next(4) == "b"
    turns.give_up("b", 1)
    turns.wait("b", 1, 4)  # again
    assert turns.next(4) == "c"


def test_a_model_with_endless_requests_lets_another_have_its_turn() -> None:
    turns = awake("a")
    turns.begin()
    turns.wait("b", 1, 10)
    assert turns.admits("a", 10 + TURN_S - 1)
    late = 10 + TURN_S
    assert not turns.admits("a", late)
    turns.wait("a", 2, late)
    assert turns.released(late) == []
    assert turns.next(late) is None  # one is in flight
    turns.end(late)
    assert turns.next(late) == "b"


def test_each_turn_admits_requests_however_long_others_have_waited() -> None:
    turns, now = asleep("a", "b", "c"), 3 * TURN_S
    for model in ("a", "b", "c"):
        turns.wait(model, model, 0)  # all have waited at a router that was restarted
    for model in ("a", "b", "c"):
        assert turns.next(now) == model
        turns.wake(model, now)
        assert turns.released(now) == [model]
        assert turns.admits(model, now + TURN_S - 1)
        turns.begin()
        turns.end(now + TURN_S)
        now += TURN_S + IDLE_S


def test_a_model_that_closes_opens_again_if_the_others_no_longer_wait() -> None:
    turns = awake("a")
    turns.wait("b", 1, 0)
    turns.wait("a", 2, TURN_S)
    assert turns.released(TURN_S) == []
    turns.give_up("b", 1)
    assert turns.released(TURN_S) == [2]
    assert turns.admits("a", TURN_S)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=5), max_size=12), st.integers(min_value=1, max_value=4))
def test_functions_that_ask_one_model_after_another_all_finish(functions: list[list[str]], places: int) -> None:
    """Whatever they ask and however few run at a time, with the fewest turns for equal functions."""
    turns = asleep("a", "b", "c")
    left = {number: list(asked) for number, asked in enumerate(functions)}
    now, wakes, blocked = 0.0, 0, set[int]()
    while any(left.values()):
        now += 1
        blocked -= {number for number in turns.released(now) if isinstance(number, int)}
        running = [number for number, asked in left.items() if asked and number not in blocked][:places]
        for number in running:
            model = left[number][0]
            if turns.admits(model, now):
                turns.begin()
                left[number].pop(0)
                turns.end(now)
            else:
                turns.wait(model, number, now)
                blocked.add(number)
        if (model_next := turns.next(now)) is not None:
            turns.wake(model_next, now)
            wakes += 1
        assert now < 1000
    assert wakes <= sum(map(len, functions))
    if functions and all(asked == functions[0] for asked in functions):
        changes = sum(a != b for a, b in zip(functions[0], functions[0][1:], strict=False)) + bool(functions[0])
        assert wakes <= changes * (1 if places >= len(functions) else len(functions))
