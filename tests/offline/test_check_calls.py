from __future__ import annotations

import asyncio

import pytest

from reward_loop.offline.check_calls import StepTimer


@pytest.mark.filterwarnings("error")
async def test_results_errors_and_cancellation_reach_tasks_as_without_the_timer() -> None:
    seen: list[str] = []

    async def returns() -> int:
        await asyncio.sleep(0)
        return 1

    async def raises() -> None:
        await asyncio.sleep(0)
        raise LookupError("no")

    async def cleans_up() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    with StepTimer():
        waiting = asyncio.create_task(cleans_up())
        assert await asyncio.create_task(returns(), name="one") == 1
        with pytest.raises(LookupError, match="no"):
            await asyncio.create_task(raises())
        waiting.cancel()
        unstarted = asyncio.create_task(returns())
        unstarted.cancel()
        for task in (waiting, unstarted):
            with pytest.raises(asyncio.CancelledError):
                await task
    assert seen == ["cleaned up"]
    assert asyncio.get_running_loop().get_task_factory() is None
