"""What a call changes in its arguments, no other call sees."""

from __future__ import annotations

import os
import threading
from collections import UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction
from reward_loop.errors import TransientError
from reward_loop.scoring import ListScoringFunction
from reward_loop.scoring.signature import own_copy

RETRIES = RewardLoopConfig(retry={"initial_wait": 0.001})


@dataclass
class Rubric:
    points: list[str] = field(default_factory=lambda: ["a", "b"])


@dataclass(frozen=True)
class Frozen:
    name: str


def nested() -> np.ndarray:
    array = np.empty(1, dtype=object)
    array[0] = ["a", "b"]
    return array


MUTABLE: dict[str, tuple[Any, Any]] = {
    "list": (lambda: ["a", "b"], lambda value: value.pop()),
    "nested dict": (lambda: {"x": {"y": ["a", "b"]}}, lambda value: value["x"]["y"].pop()),
    "list in a tuple": (lambda: (["a", "b"],), lambda value: value[0].pop()),
    "set": (lambda: {"a", "b"}, lambda value: value.pop()),
    "bytes": (lambda: bytearray(b"ab"), lambda value: value.pop()),
    "numbers": (lambda: np.array([1, 2]), lambda value: value.__setitem__(0, 7)),
    "array of lists": (nested, lambda value: value[0].pop()),
    "dataclass": (Rubric, lambda value: value.points.append("c")),
}


@pytest.mark.parametrize("place", ["ground_truth", "extra_info", "prompt", "reward_kwargs"])
@pytest.mark.parametrize("kind", MUTABLE)
async def test_what_a_failed_attempt_changes_is_as_before_in_the_next(place: str, kind: str) -> None:
    make, change = MUTABLE[kind]
    seen: list[str] = []

    def score(value: Any) -> float:
        seen.append(repr(value))
        change(value)
        if len(seen) < 3:
            raise TransientError("busy")
        return float(len(seen))

    functions = {
        "ground_truth": lambda ground_truth: score(ground_truth),
        "extra_info": lambda extra_info: score(extra_info["value"]),
        "prompt": lambda prompt: score(prompt),
        "reward_kwargs": lambda configured: score(configured),
    }
    value = make()
    sample = RewardSample("", ground_truth=value, extra_info={"value": value}, prompt=value)
    own = {"configured": value} if place == "reward_kwargs" else None
    result = await ScoringFunction(functions[place], options=RETRIES, reward_kwargs=own)(sample)
    assert (result.score, result.attempts) == (3.0, 3), result.error
    if (place, kind) == ("reward_kwargs", "dataclass"):  # an object, such as a client, which calls share
        assert len(set(seen)) == 3
        return
    assert len(set(seen)) == 1
    assert repr(value) == repr(make())


async def test_objects_that_are_configured_or_passed_by_a_trainer_are_not_copied_with_their_methods() -> None:
    class Client:
        asked = 0

        def ask(self) -> int:
            self.asked += 1
            return self.asked

    client, state, completion = Client(), Client(), ["a"]

    def compute_score(ask, others, **kwargs) -> float:
        ask()
        others[0]()
        kwargs["trainer_state"].ask()
        kwargs["completions"][0].append("b")
        if client.asked < 4:
            raise TransientError("busy")
        return len(kwargs["completions"][0])

    own = {"ask": client.ask, "others": [client.ask]}
    sample = RewardSample("", kwargs={"trainer_state": state, "completions": [completion]})
    result = await ScoringFunction(compute_score, options=RETRIES, reward_kwargs=own)(sample)
    assert (result.score, client.asked, state.asked, completion) == (2.0, 4, 2, ["a"])


class Rules(list[Any]):
    pass


Pair = namedtuple("Pair", ("client", "seen"))

AROUND: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda item: {"a": item}, lambda value: value["a"]),
    "default dict": (lambda item: defaultdict(list, a=item), lambda value: value["a"]),
    "user dict": (lambda item: UserDict(a=item), lambda value: value["a"]),
    "subclass of list": (lambda item: Rules([item]), lambda value: value[0]),
    "user list": (lambda item: UserList([item]), lambda value: value[0]),
    "deque": (lambda item: deque([item], maxlen=1), lambda value: value[0]),
    "tuple": (lambda item: (1, item), lambda value: value[1]),
    "named tuple": (lambda item: Pair(item, 1), lambda value: value.client),
}
"""Containers: how one is made of an item, and how the item is read."""


@pytest.mark.parametrize("kind", AROUND)
def test_an_object_in_a_configured_container_is_shared_and_the_container_is_not(kind: str) -> None:
    class Client:
        pass

    make, read = AROUND[kind]
    client = Client()
    given = make({"client": client, "seen": []})
    copied = own_copy(given, objects=False)
    assert type(copied) is type(given)
    assert read(copied)["client"] is client
    read(copied)["seen"].append(1)
    assert read(given)["seen"] == []
    # What cannot be copied is shared alone: the rest of its container is not.
    lock = threading.Lock()
    copied = own_copy(given := make({"lock": lock, "seen": []}))
    assert read(copied)["lock"] is lock
    read(copied)["seen"].append(1)
    assert read(given)["seen"] == []


def test_mappings_that_stand_for_something_else_are_shared() -> None:
    assert own_copy(os.environ, objects=False) is os.environ


async def test_the_samples_of_a_batch_do_not_share_their_references() -> None:
    def ticks_off(solution_strs, ground_truths):
        return [truth.remove(text) or 1.0 for text, truth in zip(solution_strs, ground_truths, strict=True)]

    results = await ListScoringFunction(ticks_off)([RewardSample("a", ground_truth=["a"])] * 4)
    assert [result.score for result in results] == [1.0] * 4


async def test_numbers_texts_and_frozen_things_are_shared_and_what_cannot_be_copied_too() -> None:
    for value in ("text", 10**30, 1.5, b"", None, True, Decimal(1), ("a", (1, 2)), frozenset("ab"), len, Rubric):
        assert own_copy(value) is value
    lock = threading.Lock()
    assert own_copy([lock])[0] is lock
    assert own_copy({"a": [Frozen("b")]}) == {"a": [Frozen("b")]}


@pytest.mark.parametrize("kind", [list, deque])
async def test_a_value_that_contains_itself_fails_its_sample_alone(kind: type[list[Any] | deque[Any]]) -> None:
    looped = kind()
    looped.append(looped)
    sample = RewardSample("", uid="u3", ground_truth=looped)
    function = ScoringFunction(lambda ground_truth: 1.0)
    result = await function(sample)
    assert result.attempts == 0
    assert "u3" in (result.error or "")
    assert "contains itself" in (result.error or "")
    assert (await function(replace(sample, ground_truth=[]))).score == 1.0
    (failed,) = await ListScoringFunction(lambda ground_truths: [1.0])([sample])
    assert "contains itself" in (failed.error or "")


async def test_uid_and_attempt_are_passed_by_their_names() -> None:
    seen = []

    def compute_score(uid, attempt):
        seen.append((uid, attempt))
        if attempt < 3:
            raise TransientError("busy")
        return 1.0

    function = ScoringFunction(compute_score, options=RETRIES)
    assert (await function(RewardSample("", uid="u3"))).score == 1.0
    assert seen == [("u3", 1), ("u3", 2), ("u3", 3)]
    missing = await function(RewardSample(""))
    assert "no `uid`" in (missing.error or "")
    assert (await ScoringFunction(lambda attempt, uid="none": float(uid == "none"))(RewardSample(""))).score == 1.0

    def of_lists(uids, attempt):
        return [float(attempt == 1 and uid == "u3") for uid in uids]

    assert [one.score for one in await ListScoringFunction(of_lists)([RewardSample("", uid="u3")] * 2)] == [1.0, 1.0]
