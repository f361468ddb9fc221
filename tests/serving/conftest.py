"""A manager with real engines, started once for a file that has a fixture `engine_config`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from reward_loop.config import RewardModelConfig
from reward_loop.serving import RewardModelManager
from tests.support.servers import Watched


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models(engine_config: RewardModelConfig) -> AsyncIterator[RewardModelManager]:
    """Run a manager in a task of its own: entry and exit of a fixture are in two tasks. No process is left after it."""
    ready: asyncio.Future[RewardModelManager] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def hold() -> None:
        async with RewardModelManager(engine_config) as manager:
            ready.set_result(manager)
            await stop.wait()

    holding = asyncio.create_task(hold())
    await asyncio.wait([holding, ready], return_when=asyncio.FIRST_COMPLETED)
    if holding.done():
        await holding
    manager = ready.result()
    pids = list(manager.pids().values())
    watched = Watched([*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True))])
    yield manager
    stop.set()
    await holding
    assert watched.left_after(0) == 0
    watched.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(models: RewardModelManager) -> AsyncIterator[Any]:
    """Return OpenAI's client of the router."""
    url = f"http://{models.reward_router_address}/v1"
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
