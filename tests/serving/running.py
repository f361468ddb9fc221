"""Runs a manager for a fixture whose entry and exit are in two tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager
from tests.servers import Watched


@asynccontextmanager
async def running(config: RewardModelConfig) -> AsyncIterator[RewardModelManager]:
    """Run a manager in a task of its own, and check that no process is left after it."""
    ready: asyncio.Future[RewardModelManager] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def hold() -> None:
        async with RewardModelManager(config) as manager:
            ready.set_result(manager)
            await stop.wait()

    holding = asyncio.create_task(hold())
    await asyncio.wait([holding, ready], return_when=asyncio.FIRST_COMPLETED)
    if holding.done():
        await holding
    manager = ready.result()
    watched = Watched([*manager.pids().values(), *(p.pid for pid in manager.pids().values() for p in below(pid))])
    yield manager
    stop.set()
    await holding
    assert watched.left_after(0) == 0
    watched.close()


def below(pid: int) -> list[psutil.Process]:
    """Return the processes below a process."""
    return psutil.Process(pid).children(recursive=True)
