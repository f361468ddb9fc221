from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from reward_loop.errors import ServerDiedError, ServerError
from reward_loop.serving import supervisor as supervision
from reward_loop.serving.supervisor import Supervisor
from tests.support.servers import until


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


class Servers(list[FakeServer]):
    """All servers that were made."""

    def new(self) -> FakeServer:
        self.append(FakeServer())
        return self[-1]


async def test_a_server_that_cannot_be_made_ready_for_use_is_stopped_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(supervision, "_pause_s", lambda restarts: pauses.append(restarts) or 0)
    servers = Servers()
    up: asyncio.Queue[str] = asyncio.Queue()

    async def on_up(url: str) -> None:
        if len(servers) == 2:
            raise ServerError("it will not sleep")
        up.put_nowait(url)

    supervisor = Supervisor(servers.new, on_up=on_up)
    supervisor.start()
    async with asyncio.timeout(30):
        await up.get()
        servers[0].dies.set()
        await up.get()
    assert [server.entered for server in servers] == [False, False, True]
    assert pauses == [0, 1]
    await supervisor.stop()
    assert not servers[-1].entered


async def test_a_server_is_restarted_after_a_time_without_free_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_pause_s", lambda restarts: 0)
    servers = Servers()
    full = iter([False, True, False])

    def new() -> FakeServer:
        if next(full):
            raise OSError(errno.EMFILE, "Too many open files")
        return servers.new()

    down = AsyncMock()
    supervisor = Supervisor(new, on_down=down)
    supervisor.start()
    await supervisor.started
    servers[0].dies.set()
    await until(lambda: len(servers) == 2)
    assert "Too many open files" in str(down.await_args_list[1])
    await supervisor.stop()


async def test_restarts_are_limited_within_a_time_and_go_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 1000.0, []
    go_on = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(round(seconds, 1))
        await go_on.acquire()
        now += seconds + 1  # the server lives for a second

    monkeypatch.setattr(supervision, "_MAX_RESTARTS", 2)
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now)
    monkeypatch.setattr(supervision, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    servers = Servers()
    supervisor = Supervisor(servers.new)
    supervisor.start()
    await supervisor.started
    for number in range(5):
        servers[-1].dies.set()
        await until(lambda number=number: len(pauses) == number + 1)
        go_on.release()
        await until(lambda number=number: len(servers) == number + 2)
    assert pauses == [0, 0.2, 597.8, 0.4, 597.6]
    await supervisor.stop()


async def test_a_server_that_waits_for_a_place_does_not_delay_the_start_of_others() -> None:
    starts = asyncio.Semaphore(1)
    servers = without_place, _ = FakeServer(), FakeServer()
    without_place.has_place.clear()
    supervisors = [Supervisor(partial(next, iter([s])), starts=starts) for s in servers]
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


@pytest.mark.parametrize("error", [ServerError("it will not sleep"), TypeError("a defect")])
async def test_an_error_of_the_first_start_is_reported_and_the_start_not_repeated(error: Exception) -> None:
    servers = Servers()

    async def on_up(_: str) -> None:
        raise error

    supervisor = Supervisor(servers.new, on_up=on_up)
    supervisor.start()
    with pytest.raises(type(error), match=str(error)):
        await supervisor.started
    await supervisor.stop()
    assert [server.entered for server in servers] == [False]


async def test_an_unexpected_error_of_a_restart_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers()

    async def on_down(_: str) -> None:
        raise TypeError("a defect")

    supervisor = Supervisor(servers.new, on_down=on_down)
    supervisor.start()
    await supervisor.started
    servers[0].dies.set()
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
    supervisor = Supervisor(lambda: server)
    supervisor.start()
    await supervisor.started
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.01)
    stopping.cancel()
    await asyncio.wait([stopping], timeout=30)
    assert stopping.cancelled()
    assert server.ended
