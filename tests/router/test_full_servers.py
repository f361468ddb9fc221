"""Servers that refuse requests because they are full, without a ``Retry-After``."""

from __future__ import annotations

import asyncio

import pytest

from reward_loop.router.backend import BackendState
from reward_loop.router.http_client import BackendAnswer
from tests.router.test_retries import Caller, Scripted, answer, calling


class Full(Scripted):
    """A server with 8 places, whose answers take some turns of the event loop."""

    def __init__(self, status: int, turns: int = 20) -> None:
        super().__init__(answer(status))
        self.status, self.turns, self.now, self.accepted = status, turns, 0, 0

    async def request(self, *request: bytes) -> BackendAnswer:
        self.asked += 1
        if self.now >= 8:
            await asyncio.sleep(0)
            return answer(self.status)
        self.now += 1
        self.accepted += 1
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.now -= 1
        return answer(200)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("turns", [1, 3, 20])  # 1: a busy event loop reads answers and refusals together
async def test_requests_wait_for_free_places(status: int, servers: int, turns: int) -> None:
    full = [Full(status, turns) for _ in range(servers)]
    async with calling(*full, health_interval_s=1000) as caller, asyncio.timeout(30):
        assert set(await asyncio.gather(*(caller.ask() for _ in range(400)))) == {200}
        # All come at once, so each is refused once; then nearly none.
        assert sum(server.asked - server.accepted for server in full) < 1.3 * 400
        assert [backend.state for backend in caller.pool.backends] == [BackendState.UP] * servers
        assert not any(backend.cooling_down for backend in caller.pool.backends)
        before = sum(server.asked for server in full)
        assert set(await asyncio.gather(*(caller.ask() for _ in range(400)))) == {200}
        assert sum(server.asked for server in full) - before < 1.2 * 400


async def test_a_waiting_request_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    async with calling(Full(503), health_interval_s=1000) as caller, asyncio.timeout(30):
        asking = [asyncio.create_task(caller.ask()) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in asking[50:]:
            task.cancel()
        assert {*(await asyncio.gather(*asking[:50]))} == {200}
        await asyncio.wait(asking)
        assert await caller.ask() == 200


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_that_is_refused_whatever_the_load_is_gets_the_answer(status: int) -> None:
    busy = asyncio.Event()

    class Picky(Scripted):
        async def request(self, *request: bytes) -> BackendAnswer:
            if b"too-long" in request[2]:
                self.asked += 1
                return answer(status)
            busy.set()
            await asyncio.sleep(0.001)
            return answer(200)

    picky = Picky(answer(status))
    is_over = False

    async def ask_on(caller: Caller) -> None:
        while not is_over:
            assert await caller.ask() == 200

    async with calling(picky, health_interval_s=1000) as caller, asyncio.timeout(30):
        others = [asyncio.create_task(ask_on(caller)) for _ in range(8)]
        await busy.wait()
        assert await caller.ask((b"x-text", b"too-long")) == status
        assert picky.asked == 10
        is_over = True
        await asyncio.gather(*others)
        assert not caller.pool.backends[0].cooling_down


async def test_a_server_that_refuses_everything_is_not_full() -> None:
    async with calling(Scripted(answer(503)), max_failures=100, health_interval_s=1000) as caller, asyncio.timeout(30):
        assert set(await asyncio.gather(*(caller.ask() for _ in range(20)))) == {503}
