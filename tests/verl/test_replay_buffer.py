"""How long verl's replay buffer waits."""

from __future__ import annotations

from collections import defaultdict

import pytest

from reward_loop.errors import RewardLoopError
from reward_loop.verl import replay_buffer
from reward_loop.verl.replay_buffer import Patience

OPTION = "trainer.stall"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replay_buffer, "monotonic", clock)
    return clock


class Buffer:
    """The parts of verl's replay buffer that say what is there; a poll takes a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.polls = 0
        self.partitions: dict[str, dict[str, dict]] = defaultdict(dict)
        self.pending_keys: dict[str, set[str]] = defaultdict(set)
        self.running_keys: dict[str, set[str]] = defaultdict(set)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.clock.now += 1
        self.polls += 1
        return last_debug_time + 1


def poll(buffer: Buffer, times: int, partition_id: str = "train") -> None:
    for _ in range(times):
        assert buffer._wait_for_next_poll(partition_id, 5.0) == 6.0


def test_a_wait_without_news_ends_and_names_what_is_missing(clock: Clock) -> None:
    buffer = Buffer(clock)
    buffer.running_keys["val"] = {f"p{i}" for i in range(7)}
    buffer.partitions["val"] = {"p1_0_0": {}, "p1_2_0": {}, "p1_2_1": {}}
    Patience(buffer, lambda: None, 10, OPTION)
    with pytest.raises(RewardLoopError) as caught:
        poll(buffer, 20, "val")
    message = str(caught.value)
    assert "11 s while validation waited for 7 prompts (trainer.stall=10)" in message
    assert "prompt p1: rewards of rollouts 0, 2 are there" in message
    assert "prompt p0: rewards of rollouts none are there" in message
    assert "and 2 prompts more" in message


def test_news_and_work_between_waits_do_not_count(clock: Clock) -> None:
    buffer = Buffer(clock)
    buffer.pending_keys["train"] = {"p"}
    Patience(buffer, lambda: None, 10, OPTION)
    for number in range(5):
        poll(buffer, 9)
        buffer.partitions["train"][f"p_{number}_0"] = {}
    poll(buffer, 5)
    clock.now += 1000  # the trainer updates
    poll(buffer, 5)
    assert buffer.polls == 55


def test_without_a_limit_it_waits_for_ever(clock: Clock) -> None:
    buffer = Buffer(clock)
    Patience(buffer, lambda: None, None, OPTION)
    poll(buffer, 10_000)
    assert buffer.polls == 10_000


def test_what_must_stop_the_run_ends_the_wait(clock: Clock) -> None:
    def look() -> None:
        if clock.now > 3:
            raise RewardLoopError("too many failures")

    buffer = Buffer(clock)
    Patience(buffer, look, None, OPTION)
    with pytest.raises(RewardLoopError, match="too many failures"):
        poll(buffer, 9)
    assert buffer.polls == 4
