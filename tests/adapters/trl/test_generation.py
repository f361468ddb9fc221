"""The batches that are read ahead, and the calls of async reward functions while another thread continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from reward_loop.adapters.trl.generation import Judging, Lookahead


def walk(count: int, every: int, accumulation: int, steps: int) -> list[tuple[Any, Any, int]]:
    """Return each batch that starts a generation, the following one, and the step of the first."""
    lookahead = Lookahead(iter([[index // every] for index in range(count)]))
    seen, position = [], 0
    for step in range(steps):
        for batch in lookahead.take(accumulation, every, step=step, last_step=steps, accumulation=accumulation):
            if position % every == 0:
                seen.append((batch[0], batch.following and batch.following[0], batch.step))
            position += 1
    return seen


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ({"count": 4, "every": 1, "accumulation": 1, "steps": 4}, [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, None, 3)]),
        # More data than steps.
        ({"count": 100, "every": 1, "accumulation": 1, "steps": 2}, [(0, 1, 0), (1, None, 1)]),
        # A generation for several steps, and several generations in a step.
        ({"count": 100, "every": 4, "accumulation": 1, "steps": 8}, [(0, 1, 0), (1, None, 4)]),
        ({"count": 100, "every": 1, "accumulation": 2, "steps": 2}, [(0, 1, 0), (1, 2, 0), (2, 3, 1), (3, None, 1)]),
    ],
)
def test_each_generation_is_followed_by_the_next_and_the_last_by_none(shape: dict[str, int], seen: Any) -> None:
    assert walk(**shape) == seen


def test_the_following_batch_has_the_step_in_which_it_is_trained_on() -> None:
    lookahead = Lookahead(iter([[0], [0], [1], [1]]))
    first, _ = lookahead.take(2, 2, step=5, last_step=9, accumulation=2)
    later, _ = lookahead.take(2, 2, step=6, last_step=9, accumulation=2)
    assert first.following is later
    assert later.step == 6
    assert lookahead.take(1, 1, step=7, last_step=9, accumulation=1) == []


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_functions_start_at_once_and_their_logs_are_deferred(loop: asyncio.AbstractEventLoop) -> None:
    started, logged = threading.Event(), []

    async def judge(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        started.set()
        log_metric("length", 2.0)
        return [float(len(text)) for text in completions]

    judging = Judging({1: judge}, {"completions": ["ab"], "log_metric": lambda *args: logged.append(args)}, loop)
    assert started.wait(30)
    assert logged == []
    assert judging.rewards(1) == [2.0]
    assert logged[0] == ("length", 2.0)
    assert [name for name, _ in logged[1:]] == [
        "overlap/waiting_seconds",
        "overlap/judging_seconds",
        "overlap/hidden_share",
    ]


def test_an_error_of_one_function_cancels_the_others(loop: asyncio.AbstractEventLoop) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def fails(**_: Any) -> list[float]:
        await asyncio.to_thread(started.wait, 30)
        raise ValueError("no judge")

    async def hangs(**_: Any) -> list[float]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    judging = Judging({0: fails, 1: hangs}, {}, loop)
    with pytest.raises(ValueError, match="no judge"):
        judging.rewards(0)
    assert cancelled.wait(30)
