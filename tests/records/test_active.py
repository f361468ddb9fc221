from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Generator

import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.records import ActiveSample, active_samples, current
from tests.support.clock import until


@pytest.fixture
def new() -> Callable[[], list[ActiveSample]]:
    """The running calls that earlier tests have not left."""
    left = active_samples()
    return lambda: [call for call in active_samples() if call not in left]


async def test_a_call_in_a_thread_leaves_nothing_for_the_garbage_collector() -> None:
    manager = NaiveRewardLoopManager(compute_score=lambda solution_str: 1.0)
    info: UserDict[str, int] = UserDict()
    left = weakref.ref(info)
    gc.disable()
    try:
        await manager.run_single(RewardSample("x", extra_info=info))
        del info
        await until(lambda: left() is None)  # the thread may hold it a little longer
    finally:
        gc.enable()


async def test_a_call_is_listed_while_it_is_running(new: Callable[[], list[ActiveSample]]) -> None:
    go = asyncio.Event()
    uids: list[str | None] = []

    async def compute_score(solution_str: str) -> float:
        call = current()
        assert call is not None
        uids.append(call.sample.uid)
        await go.wait()
        return 1.0

    manager = NaiveRewardLoopManager(compute_score=compute_score)
    tasks = [asyncio.create_task(manager.run_single(RewardSample("x", uid=f"q{i}", data_source="d"))) for i in range(3)]
    await until(lambda: len(uids) == 3)
    assert [call.sample.uid for call in new()] == uids == ["q0", "q1", "q2"]
    assert "compute_score" in new()[0].function
    go.set()
    await asyncio.gather(*tasks)
    assert new() == []
    assert current() is None


def test_a_call_whose_loop_is_closed_is_not_listed_as_running(new: Callable[[], list[ActiveSample]]) -> None:
    @types.coroutine
    def waiting() -> Generator[None, None, None]:
        yield

    async def work() -> None:
        with ActiveSample(RewardSample("a"), "f"):
            await waiting()

    coroutine = work()
    contextvars.copy_context().run(coroutine.send, None)
    assert len(new()) == 1
    coroutine.close()  # as the garbage collector does
    assert new() == []


def test_threads_of_a_function_can_wait_at_the_same_time() -> None:
    sample = ActiveSample(RewardSample("x"), "compute_score")
    errors: list[Exception] = []

    def wait(request: str) -> None:
        try:
            for _ in range(20_000):
                sample.ask(request)
                sample.answered(request)
        except ValueError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=wait, args=(str(number),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (errors, sample.waits()) == ([], [])
