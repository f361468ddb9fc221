"""What the tests of limits share: limiter services that end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from reward_loop import RewardLoopConfig
from reward_loop.limits.server import LimitServer

Serve = Callable[[RewardLoopConfig], Awaitable[tuple[LimitServer, str]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Yield a function that starts a limiter service, and returns it with its address."""
    async with AsyncExitStack() as stack:

        async def start(options: RewardLoopConfig) -> tuple[LimitServer, str]:
            service = LimitServer(options)
            address = await service.start()
            stack.push_async_callback(service.stop)
            return service, address

        yield start
