from __future__ import annotations

import asyncio
import contextvars

import pytest

from reward_loop import RewardSample, ScoringFunction
from reward_loop.scoring.eager import EagerTask, EagerTasks

NAME = contextvars.ContextVar("name", default="")


def eager() -> EagerTasks:
    return EagerTasks(asyncio.get_running_loop())


def begin(tasks, coroutine):
    """What it returned, or its task."""
    begun = tasks.begin(coroutine, None)
    return begun.task if isinstance(begun, EagerTask) else begun


async def test_what_does_not_wait_ends_at_once():
    async def add(a, b):
        return a + b

    assert begin(eager(), add(1, 2)) == 3


async def test_what_waits_goes_on_in_the_task_in_which_it_began():
    seen = []

    async def look():
        for _ in range(3):
            seen.append(asyncio.current_task())
            await asyncio.sleep(0)
        return len(seen)

    caller = asyncio.current_task()
    task = begin(eager(), look())
    assert asyncio.current_task() is caller
    assert await task == 3
    assert seen == [task] * 3


async def test_a_task_is_lent_on_only_where_nothing_waits_in_it():
    seen = []

    async def quick():
        seen.append(asyncio.current_task())

    async def slow():
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)

    async def cancels_itself():
        seen.append(asyncio.current_task())
        asyncio.current_task().cancel()

    tasks = eager()
    begin(tasks, quick())
    waiting = [begin(tasks, slow()), begin(tasks, slow())]
    begin(tasks, cancels_itself())
    waiting.append(begin(tasks, slow()))
    await asyncio.gather(*waiting)
    assert seen[0] is seen[1]  # lent on
    assert len(set(seen)) == 4
    begin(tasks, quick())
    assert seen[-1] not in seen[:-1]  # those of another turn have ended


async def test_one_begun_inside_another():
    tasks = eager()

    async def inner():
        await asyncio.sleep(0)
        return asyncio.current_task()

    async def outer():
        begun = begin(tasks, inner())
        assert asyncio.current_task() is not begun
        return begun, asyncio.current_task()

    inner_task, outer_task = begin(tasks, outer())
    assert await inner_task is inner_task is not outer_task


async def test_its_context_is_its_own_at_every_step():
    async def change(name):
        NAME.set(name)
        await asyncio.sleep(0)
        before = NAME.get()
        NAME.set(before + "!")
        await asyncio.sleep(0)
        return NAME.get()

    NAME.set("caller")
    tasks = eager()
    assert await asyncio.gather(begin(tasks, change("a")), begin(tasks, change("b"))) == ["a!", "b!"]
    assert NAME.get() == "caller"


async def test_an_error_at_the_first_step_and_at_a_later_one():
    async def fail(steps):
        for _ in range(steps):
            await asyncio.sleep(0)
        raise ValueError(steps)

    tasks, caller = eager(), asyncio.current_task()
    with pytest.raises(ValueError, match="0"):
        begin(tasks, fail(0))
    assert asyncio.current_task() is caller
    with pytest.raises(ValueError, match="1"):
        await begin(tasks, fail(1))


async def test_what_it_waits_for_may_fail():
    future = asyncio.get_running_loop().create_future()

    async def wait():
        try:
            await future
        except ValueError as error:
            await asyncio.sleep(0)
            return str(error)

    task = begin(eager(), wait())
    future.set_exception(ValueError("broken"))
    assert await task == "broken"


async def test_cancelling_the_task_reaches_the_coroutine_before_and_after_it_has_run():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    tasks = eager()
    early, late = begin(tasks, wait()), begin(tasks, wait())
    early.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(early, late, return_exceptions=True)
    assert early.cancelled()
    assert late.cancelled()
    assert ended == [True, True]


async def test_a_cancellation_before_the_task_has_run_may_be_swallowed():
    async def wait():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            return "still there"

    task = begin(eager(), wait())
    task.cancel()
    assert await asyncio.wait_for(task, 30) == "still there"


async def test_a_task_names_its_coroutine():
    async def wait_for_a_judge():
        await asyncio.sleep(0)

    task = begin(eager(), wait_for_a_judge())
    assert "wait_for_a_judge" in repr(task)
    assert task.get_stack()[-1].f_code.co_name == "wait_for_a_judge"
    await task


class Exit(BaseException):
    pass


async def test_nobody_waits_for_ever_for_one_that_is_torn_down():
    async def wait():
        await asyncio.sleep(0)
        raise Exit

    begun = eager().begin(wait(), None)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(begun.future, 30)
    with pytest.raises(Exit):
        await begun.task


async def test_timeouts_and_task_groups_that_a_reward_function_begins_with():
    async def compute_score(solution_str):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, 2.0))
        return task.result()

    function = ScoringFunction(compute_score)
    results = await asyncio.gather(*(function(RewardSample("")) for _ in range(3)))
    assert [result.score for result in results] == [2.0] * 3


async def test_a_loop_over_samples_lets_others_have_their_turn():
    async def compute_score(solution_str):
        return 1.0

    turns = 0

    async def other():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    function = ScoringFunction(compute_score)
    for _ in range(20):
        await function(RewardSample(""))
    task.cancel()
    assert turns >= 9
