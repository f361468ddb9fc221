from __future__ import annotations

import pytest

from reward_loop.errors import RewardLoopError
from reward_loop.verl.assignments import MAX_DEATHS, Assignments


def assigned() -> Assignments:
    assignments = Assignments()
    assignments.assign(0, ["A", "B"], ["a", "b"])
    assignments.assign(1, ["C"], ["c"])
    return assignments


def test_the_prompts_of_a_worker_are_found_with_their_data() -> None:
    assignments = assigned()
    assert assignments.of([0]) == {"a", "b"}
    assert assignments.of([0, 1]) == {"a", "b", "c"}
    assert assignments.of([2]) == set()
    assert assignments.get("b") == (0, ["B"])
    assert assignments.get("c") == (1, ["C"])


def test_finished_prompts_are_not_kept() -> None:
    assignments = assigned()
    assignments.keep({"b", "z"})
    assert assignments.of([0, 1]) == {"b"}


def test_a_prompt_whose_workers_die_again_and_again_is_an_error_that_names_it() -> None:
    assignments = assigned()
    for _ in range(MAX_DEATHS):
        assignments.count_deaths({"a"})
    assignments.count_deaths({"b", "c"})
    with pytest.raises(RewardLoopError, match=f"{MAX_DEATHS + 1} agent loop workers died .* prompt a: does the agent"):
        assignments.count_deaths({"a", "b"})
    for _ in range(MAX_DEATHS - 2):
        assignments.count_deaths({"b"})
    with pytest.raises(RewardLoopError, match="prompt a and 1 other prompts"):
        assignments.count_deaths({"a", "b", "c"})
