"""The calls of async reward functions while another thread continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from reward_loop.adapters.trl.judging import Judging


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
    assert 0 <= judging.hidden_share <= 1


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


def test_the_hidden_share_is_the_time_without_waiting(loop: asyncio.AbstractEventLoop) -> None:
    judging = Judging({}, {}, loop)
    assert judging.hidden_share == 1.0
    judging._began, judging._ended, judging.waiting_s = 0.0, 4.0, 1.0
    assert judging.hidden_share == 0.75
