from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_loop._util.disconnect import stop_on_disconnect


class Channel:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        return await self.messages.get()


async def test_work_that_is_done_first() -> None:
    done = []

    async def work() -> None:
        done.append(True)

    assert await stop_on_disconnect(Channel().receive, work)
    assert done


async def test_a_client_that_leaves_cancels_it() -> None:
    channel = Channel()
    cancelled = asyncio.Event()

    async def work() -> None:
        await channel.messages.put({"type": "http.request"})
        await channel.messages.put({"type": "http.disconnect"})
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert not await stop_on_disconnect(channel.receive, work)
    assert cancelled.is_set()


async def test_an_exception_of_the_work_is_raised_unchanged() -> None:
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await stop_on_disconnect(Channel().receive, work)
