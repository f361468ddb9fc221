from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop.router.policies import Affinity, Key, RoundRobin, policy_for


@dataclass(eq=False)
class Fake:
    url: str
    in_flight: int = 0
    requests: int = 0

    def begin(self) -> None:
        self.in_flight += 1
        self.requests += 1


def fakes(count: int = 4) -> Any:
    return [Fake(f"http://127.0.0.1:{8000 + number}") for number in range(count)]


def chat(*contents: Any, system: str | None = None) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    return json.dumps({"messages": messages + [{"role": "user", "content": content} for content in contents]}).encode()


def group_of(headers: list[Any], body: bytes) -> int | None:
    key = Affinity().key(headers, body)
    return key and key.group


def test_round_robin() -> None:
    policy, backends = RoundRobin(), fakes()
    turns = [policy.choose(backends, None).url for _ in range(8)]
    assert turns[:4] == turns[4:]
    assert len(set(turns)) == 4


@pytest.mark.parametrize("name", ["least_in_flight", "affinity"])
def test_the_request_decides_between_servers_that_are_equal_in_every_run(name: Any) -> None:
    def chosen(reverse: bool) -> dict[int, int]:
        policy, backends = policy_for(name), fakes()
        backends[0].in_flight = 1
        numbers = sorted(range(40), reverse=reverse)
        groups = {number: [(b"x-reward-loop-group", b"%d of run %d" % (number, reverse))] for number in numbers}
        return {
            number: backends.index(policy.choose(backends, policy.key(groups[number], chat(str(number)))))
            for number in numbers
        }

    assert chosen(False) == chosen(True)
    assert set(chosen(False).values()) == {1, 2, 3}


def test_a_group_stays_with_its_server_and_new_groups_go_to_the_least_loaded_one() -> None:
    policy, backends = Affinity(), fakes()
    homes = []
    for key in range(32):
        homes.append(policy.choose(backends, Key(key, 0)))
        homes[-1].begin()
    assert [backend.in_flight for backend in backends] == [8] * 4
    assert [policy.choose(backends, Key(key, 0)) for key in range(32)] == homes


def test_a_group_leaves_an_overloaded_server_and_stays_with_the_next_one() -> None:
    policy, (first, second) = Affinity(), fakes(2)
    first.in_flight = second.in_flight = 100
    assert policy.choose([first, second], Key(7, 0)) is first
    first.in_flight = 165  # with the request 166: at most 1.25 times the mean
    assert policy.choose([first, second], Key(7, 0)) is first
    first.in_flight = 166
    assert policy.choose([first, second], Key(7, 0)) is second
    first.in_flight = 90
    assert policy.choose([first, second], Key(7, 0)) is second


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_a_server_gets_a_request_only_within_the_bound_or_if_it_is_the_least_loaded(
    events: list[tuple[int, bool]],
) -> None:
    policy, backends = Affinity(), fakes()
    for key, ends in events:
        busy = [backend for backend in backends if backend.in_flight]
        if ends and busy:
            busy[key % len(busy)].in_flight -= 1
            continue
        server = policy.choose(backends, Key(key, 0))
        least = min(backend.in_flight for backend in backends)
        server.begin()  # type: ignore[attr-defined]
        mean = sum(backend.in_flight for backend in backends) / len(backends)
        assert server.in_flight <= 1.25 * mean or server.in_flight == least + 1


def test_only_the_groups_of_a_server_that_leaves_move_and_a_new_server_moves_none() -> None:
    policy, backends = Affinity(), fakes()
    homes = {key: policy.choose(backends, Key(key, 0)) for key in range(400)}
    policy.choose([*backends, *fakes(5)[4:]], Key(400, 0))
    for key, home in homes.items():
        moved = policy.choose(backends[1:], Key(key, 0))
        assert (moved is home) == (home is not backends[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat("question, answer"), chat("question, answer", "next turn")),
        (chat("a" * 1024 + "criterion 1"), chat("a" * 1024 + "criterion 2")),
        (chat("question", system="one"), chat("question", system="other")),
        (chat([{"type": "text", "text": "question"}]), chat([{"type": "text", "text": "question"}])),
        (b'{"prompt": "question", "n": 1}', b'{"prompt": "question", "n": 2}'),
        (b'{"input_ids": [1, 2]}', b'{"input_ids": [1, 2], "x": 1}'),
    ],
)
def test_without_a_group_prompts_with_the_same_beginning_have_the_same_key(one: bytes, other: bytes) -> None:
    assert group_of([], one) == group_of([], other) != group_of([], chat("another question"))
    assert group_of([], one) is not None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": [{}]}', b'{"prompt": 1}'])
def test_a_request_without_a_prompt_has_no_key_but_its_group(body: bytes) -> None:
    group = [(b"x-reward-loop-group", b"7")]
    assert group_of(group, body) == group_of(group, chat("x")) != group_of([], chat("x"))
    assert Affinity().key([], body) is None
