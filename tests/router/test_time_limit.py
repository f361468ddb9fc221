from __future__ import annotations

import asyncio

import pytest

from reward_loop.router.time_limit import TimeLimit


async def limited(limit: TimeLimit, event: asyncio.Event) -> bool:
    """Waits for the event; returns whether the limit was exceeded first."""
    task = asyncio.current_task()
    assert task is not None
    limit.start(task)
    try:
        await event.wait()
    except asyncio.CancelledError:
        return limit.is_exceeded(task)
    finally:
        limit.stop(task)
    return False


async def test_tasks_are_cancelled_at_their_deadlines_and_not_after_their_end() -> None:
    limit = TimeLimit(0.2)
    ending, never = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(limited(limit, ending))
    late = [asyncio.create_task(limited(limit, never)) for _ in range(2)]
    await asyncio.sleep(0)
    ending.set()
    async with asyncio.timeout(30):
        assert await asyncio.gather(first, *late) == [False, True, True]
        assert await limited(limit, never)  # The timer starts again.


async def test_a_task_that_is_cancelled_before_has_not_exceeded_the_limit() -> None:
    limit = TimeLimit(60)
    task = asyncio.create_task(limited(limit, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task is False
    limit.close()


async def test_deadlines_are_not_moved_by_tasks_that_end_before(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = TimeLimit(10)
    now = limit._loop.time()
    tasks = []
    for seconds in (0, 4):
        monkeypatch.setattr(limit._loop, "time", lambda seconds=seconds: now + seconds)
        tasks.append(asyncio.create_task(limited(limit, asyncio.Event())))
        await asyncio.sleep(0)
    for seconds, done in ((9, [False, False]), (10, [True, False]), (13, [True, False]), (14, [True, True])):
        monkeypatch.setattr(limit._loop, "time", lambda seconds=seconds: now + seconds)
        limit._cancel_late()
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == done
    monkeypatch.undo()
    limit.close()
