"""The router in front of server processes that are killed or frozen."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from reward_loop._util.process import ParentDeathPipe
from reward_loop._util.web_server import listen, url_of
from reward_loop.router.app import Router
from reward_loop.router.config import RouterConfig
from tests.support.servers import STUB_COMMAND, listed, served_by_router, until

pytestmark = pytest.mark.integration

CALLERS = 64


class Stub:
    """A server process on a listening socket that this process keeps, as `RewardModelManager` does."""

    def __init__(self, listener: socket.socket, delay_s: float, gate: Path | None) -> None:
        self.url = url_of(listener)
        self._parent_death = pipe = ParentDeathPipe()
        fds = listener.fileno(), pipe.child_fd
        command = [*STUB_COMMAND, "--fd", str(fds[0]), "--parent-pipe", str(fds[1])]
        environment = {**os.environ, "STUB_DELAY": str(delay_s), "STUB_GATE": str(gate or "")}
        self.process = subprocess.Popen(command, pass_fds=fds, env=environment)
        pipe.close_child_fd()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._parent_death.close()


@asynccontextmanager
async def routed_stubs(
    *delays_s: float, gate: Path | None = None, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[Stub]]]:
    """A client of the router in front of stub servers, once all are in use. With a gate, they answer when that file
    exists."""
    async with AsyncExitStack() as stack:
        stubs = []
        for delay_s in delays_s:
            stub = Stub(stack.enter_context(listen("127.0.0.1")), delay_s, gate)
            stack.callback(stub.close)
            stubs.append(stub)
        app = Router([stub.url for stub in stubs], RouterConfig(**options))
        url = await stack.enter_async_context(served_by_router(app))
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(url, connector=connector))
        async with asyncio.timeout(60):
            while [backend["state"] for backend in await listed(session)] != ["up"] * len(stubs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield session, stubs


async def echo(session: aiohttp.ClientSession, text: str) -> str:
    async with session.post("/echo", data=text) as response:
        assert response.status == 200, await response.text()
        return await response.text()


async def all_sent(session: aiohttp.ClientSession) -> list[asyncio.Task[str]]:
    """A request of each caller, once the servers have got all of them."""
    before = await sent(session)
    requests = [asyncio.create_task(echo(session, str(number))) for number in range(CALLERS)]
    async with asyncio.timeout(60):
        while await sent(session) < before + CALLERS:  # noqa: ASYNC110 (the count has no event)
            await asyncio.sleep(0.01)
    return requests


async def sent(session: aiohttp.ClientSession) -> int:
    return sum(backend["requests"] for backend in await listed(session))


async def test_requests_of_a_killed_server_do_not_wait_for_its_restart() -> None:
    # The killed server is never restarted, and nobody reports its death: its socket stays, and accepts connections.
    async with routed_stubs(0.3, 0.3) as (session, stubs):
        await asyncio.gather(*await all_sent(session))  # Now the connections to both servers are used ones.
        requests = await all_sent(session)
        stubs[0].signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await asyncio.gather(*requests) == [str(number) for number in range(CALLERS)]


async def test_requests_that_met_the_socket_of_a_dead_server_move_when_its_death_is_reported() -> None:
    async with routed_stubs(0.1, 0.1) as (session, stubs):
        stubs[0].signal(signal.SIGKILL)
        stubs[0].process.wait()
        requests = [asyncio.create_task(echo(session, str(number))) for number in range(CALLERS)]
        await until(lambda: any(request.done() for request in requests))
        query = {"url": stubs[0].url, "reason": "killed"}
        async with session.post("/workers/mark_dead", params=query) as response:
            assert response.status == 200
        async with asyncio.timeout(60):
            assert await asyncio.gather(*requests) == [str(number) for number in range(CALLERS)]


QUICK_CHECKS = {"health_interval_s": 0.2, "health_timeout_s": 2, "max_failed_checks": 2}
"""A busy machine may delay the answers of a server that is not frozen."""


async def test_requests_of_a_frozen_server_are_answered_by_another_one(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with routed_stubs(0, 0, gate=gate, **QUICK_CHECKS) as (session, stubs):
        gate.touch()
        await asyncio.gather(*await all_sent(session))
        gate.unlink()
        requests = await all_sent(session)
        stubs[0].freeze()
        gate.touch()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*requests) == [str(number) for number in range(CALLERS)]
            assert await state_of(session, stubs[0]) == "down"
            stubs[0].signal(signal.SIGCONT)
            while await state_of(session, stubs[0]) == "down":  # noqa: ASYNC110 (another process changes it)
                await asyncio.sleep(0.01)


async def test_requests_of_a_frozen_server_stay_while_no_other_server_is_well(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with routed_stubs(0, gate=gate, **QUICK_CHECKS) as (session, stubs):
        requests = await all_sent(session)
        stubs[0].freeze()
        gate.touch()
        async with asyncio.timeout(60):
            while await state_of(session, stubs[0]) != "down":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stubs[0].signal(signal.SIGCONT)
            assert await asyncio.gather(*requests) == [str(number) for number in range(CALLERS)]


async def state_of(session: aiohttp.ClientSession, stub: Stub) -> str:
    return next(backend["state"] for backend in await listed(session) if backend["url"] == stub.url)
