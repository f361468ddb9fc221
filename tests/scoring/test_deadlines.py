from __future__ import annotations

import asyncio
import time

from reward_loop.scoring.deadlines import Deadlines, Watched


async def test_a_call_that_has_not_started_does_not_expire() -> None:
    loop = asyncio.get_running_loop()
    call = Watched(loop.create_future())
    Deadlines(loop).watch(call, 0.0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.future.done()
    call.started = time.monotonic()
    await asyncio.wait([call.future], timeout=30)
    assert isinstance(call.future.exception(), TimeoutError)
