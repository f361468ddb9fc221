from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from reward_loop._util.sockets import listen
from reward_loop.errors import ServerDiedError, ServerError
from reward_loop.serving import supervisor as supervision
from reward_loop.serving.supervisor import Supervisor
from tests.servers import until


class FakeServer:
    """A server that lives until it is told to die."""

    name, url, pid, started_in_s = "fake", "http://a:1", 1, 0.0

    def __init__(self) -> None:
        self.entered = False
        self.dies = asyncio.Event()
        self.has_place = asyncio.Event()
        self.has_place.set()

    @asynccontextmanager
    async def placed(self) -> AsyncIterator[None]:
        await self.has_place.wait()
        yield
        assert not self.entered

    async def __aenter__(self) -> FakeServer:
        self.entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.entered = False

    async def wait(self) -> ServerDiedError:
        await self.dies.wait()
        return ServerDiedError("it was told to")


async def test_a_server_that_cannot_be_made_ready_for_use_is_stopped_and_tried_again() -> None:
    servers: list[FakeServer] = []
    told: list[str] = []
    up = asyncio.Event()

    def new() -> FakeServer:
        servers.append(FakeServer())
        return servers[-1]

    async def on_up(url: str) -> None:
        told.append(url)
        if len(told) == 2:
            raise ServerError("it will not sleep")
        if len(told) == 3:
            up.set()

    supervisor = Supervisor(new, max_restarts=3, window_s=60, on_up=on_up)
    supervisor.start()
    await supervisor.started
    servers[0].dies.set()
    async with asyncio.timeout(30):
        await up.wait()
    assert [server.entered for server in servers] == [False, False, True]
    await supervisor.stop()
    assert not servers[-1].entered


async def test_the_first_restart_may_have_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(supervision, "_LONGEST_PAUSE_S", 600.0)
    servers: list[FakeServer] = []
    up: asyncio.Queue[str] = asyncio.Queue()
    down: asyncio.Queue[str] = asyncio.Queue()

    def new() -> FakeServer:
        servers.append(FakeServer())
        return servers[-1]

    supervisor = Supervisor(new, max_restarts=3, window_s=60, at_once=True, on_up=up.put, on_down=down.put)
    supervisor.start()
    async with asyncio.timeout(30):
        for server in range(2):
            await up.get()
            servers[server].dies.set()
            await down.get()
    assert len(servers) == 2  # the second restart has a pause
    await supervisor.stop()


async def test_a_first_start_that_fails_is_reported_and_not_repeated() -> None:
    async def on_up(_: str) -> None:
        raise ServerError("it will not sleep")

    supervisor = Supervisor(FakeServer, max_restarts=3, window_s=60, on_up=on_up)
    supervisor.start()
    with pytest.raises(ServerError, match="it will not sleep"):
        await supervisor.started
    await supervisor.stop()


async def test_a_server_that_waits_for_a_place_does_not_delay_the_start_of_others() -> None:
    starts = asyncio.Semaphore(1)
    without_place, other = FakeServer(), FakeServer()
    without_place.has_place.clear()
    supervisors = [
        Supervisor(lambda s=s: s, max_restarts=3, window_s=60, starts=starts) for s in (without_place, other)
    ]  # type: ignore[misc]
    for supervisor in supervisors:
        supervisor.start()
    async with asyncio.timeout(30):
        await supervisors[1].started
        assert not without_place.entered
        without_place.has_place.set()
        await supervisors[0].started
    assert without_place.entered
    for supervisor in supervisors:
        await supervisor.stop()
    assert not without_place.entered


async def test_a_lost_server_releases_its_address_and_so_does_one_that_is_stopped() -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    server, socket = FakeServer(), listen("127.0.0.1")
    supervisor = Supervisor(lambda: server, max_restarts=0, window_s=60, bound=socket, on_lost=lost.put)
    supervisor.start()
    await supervisor.started
    assert socket.fileno() >= 0
    server.dies.set()
    async with asyncio.timeout(30):
        assert await lost.get() == "it was told to"
    assert socket.fileno() < 0
    await supervisor.stop()
    unused = listen("127.0.0.1")
    await Supervisor(FakeServer, max_restarts=0, window_s=60, bound=unused).stop()
    assert unused.fileno() < 0


async def test_an_unexpected_error_is_raised_by_the_first_start_and_logged_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = [True]

    async def on_up(_: str) -> None:
        if broken[0]:
            raise TypeError("a defect")

    supervisor = Supervisor(FakeServer, max_restarts=3, window_s=60, on_up=on_up)
    supervisor.start()
    with pytest.raises(TypeError, match="a defect"):
        await supervisor.started
    await supervisor.stop()
    server, broken[0] = FakeServer(), False
    supervisor = Supervisor(lambda: server, max_restarts=3, window_s=60, on_up=on_up)
    supervisor.start()
    await supervisor.started
    broken[0] = True
    server.dies.set()
    await until(lambda: "a server has stopped, and is not restarted" in caplog.text)
    await supervisor.stop()


async def test_a_stop_that_is_cancelled_stops_the_server_at_once_and_waits_for_it() -> None:
    class Slow(FakeServer):
        ended = False

        async def __aexit__(self, *_: object) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                self.entered, self.ended = False, True

    server = Slow()
    supervisor = Supervisor(lambda: server, max_restarts=3, window_s=60)
    supervisor.start()
    await supervisor.started
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.wait([stopping], timeout=30)
    assert stopping.cancelled()
    assert server.ended
