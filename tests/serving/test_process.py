from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reward_loop._util.process import ParentDeathPipe
from reward_loop._util.sockets import listen, url_of
from reward_loop.errors import ServerStartError
from reward_loop.serving import process
from reward_loop.serving.process import ServerProcess
from tests.servers import STUB_COMMAND, Watched, post


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        yield listener


@pytest.fixture
def stub(listener: socket.socket, tmp_path: Path) -> Any:
    def make(command: list[str] = STUB_COMMAND, **options: Any) -> ServerProcess:
        options = {"start_timeout_s": 120.0} | options
        return ServerProcess("the stub", command, bound=listener, log_path=tmp_path / "stub.log", **options)

    return make


async def test_a_process_is_ready_inside_the_context_and_ended_after_it(stub: Any, listener: socket.socket) -> None:
    async with stub() as process:
        watched = Watched([process.pid])
        assert await post(url_of(listener), "/echo", b"hello") == (200, b"hello")
        assert os.getsid(process.pid) == process.pid
        assert process.started_in_s is not None
    assert watched.left_after(0) == 0
    watched.close()


async def test_a_later_run_serves_the_same_address_and_what_came_in_between(stub: Any, listener: socket.socket) -> None:
    async with stub() as first:
        os.kill(first.pid, signal.SIGKILL)
        assert str(await first.wait()).startswith(f"the stub (pid {first.pid}) was killed by SIGKILL.\n")
    # This connection is made while nobody is there to accept it.
    with socket.create_connection(listener.getsockname()) as early:
        early.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with stub() as second:
            early.settimeout(60)
            assert early.recv(4096).startswith(b"HTTP/1.1 200")
            assert second.pid != first.pid


async def test_a_death_is_noticed_by_whoever_reaps_it(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waitid = os.waitid

    def late(*child: Any) -> Any:
        waitid(*child)
        server._process.poll()  # As `Popen.send_signal` does; if the server dies just then, it reaps it.
        return waitid(*child)

    monkeypatch.setattr(os, "waitid", late)
    async with stub() as server:
        os.kill(server.pid, signal.SIGKILL)
        assert "was killed by SIGKILL" in str(await server.wait())


async def test_a_death_by_a_signal_without_a_name(stub: Any) -> None:
    async with stub() as server:
        os.kill(server.pid, signal.SIGRTMIN + 3)
        assert "was killed by signal 37" in str(await server.wait())


async def test_an_exit_before_it_is_ready_shows_the_log(stub: Any, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="the stub exited with status 3 before it was ready") as raised:
        await stub(env={"STUB_EXIT": "3"}).__aenter__()
    assert str(tmp_path / "stub.log") in str(raised.value)
    assert "    the stub is told to fail" in str(raised.value)


async def test_a_server_that_is_never_ready_is_killed_even_if_it_ignores_sigterm(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STOPS_WITHIN_S", 0.1)
    server = stub(env={"STUB_DEAF": "1"}, start_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="the stub was not ready after 1 s"):
        await server.__aenter__()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_stopping_a_process_that_has_just_ended(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look, waitid = threading.Event(), os.waitid

    def late(*args: Any) -> Any:
        assert look.wait(60)
        return waitid(*args)

    monkeypatch.setattr(os, "waitid", late)  # where its thread waits for its end
    async with asyncio.timeout(60), stub() as process:
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        asyncio.get_running_loop().call_soon(look.set)  # no sooner than it has been told to stop
    assert str(await process.wait()).startswith(f"the stub (pid {process.pid}) was killed by SIGKILL.")


async def test_a_command_that_does_not_exist_is_named(stub: Any) -> None:
    with pytest.raises(ServerStartError, match="no-such-command"):
        await stub(["/no-such-command"]).__aenter__()


async def test_a_forked_child_does_not_hold_the_parent_death_pipe() -> None:
    pipe = ParentDeathPipe()
    held = os.dup(pipe.child_fd)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    try:
        pipe.close()
        os.set_blocking(held, False)
        # Without the child's copy the pipe is at its end; with it, this raises BlockingIOError.
        assert _read_at_end(held) == b""
    finally:
        child.kill()
        child.join()
        os.close(held)


def _read_at_end(fd: int) -> bytes:
    import select

    select.select([fd], [], [], 60)
    return os.read(fd, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "/no/such/model"}, "error: model_path: there is no directory '/no/such/model'"),
        ({"model_path": os.path.dirname(__file__)}, "there is no config.json"),
    ],
)
async def test_the_embedded_server_refuses_a_wrong_path_at_once(
    stub: Any, options: dict[str, str], message: str
) -> None:
    program = [sys.executable, "-X", "importtime", "-m", "reward_loop.serving.embedded.app"]
    process = stub([*program, "--options", json.dumps(options)])
    with pytest.raises(ServerStartError, match="exited with status 2"):
        await process.__aenter__()
    log = process.log.path.read_text()
    assert message in log
    assert "| torch" not in log


async def test_a_long_start_is_logged_with_the_last_line_of_the_servers_log(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = asyncio.Event()

    def info(message: str, *values: Any) -> None:
        line = message % values
        assert line.startswith("the stub is still starting after")
        if line.endswith("the stub is deaf"):
            logged.set()

    monkeypatch.setattr(process, "_PROGRESS_S", 0.05)
    monkeypatch.setattr(process, "_STOPS_WITHIN_S", 0.1)
    monkeypatch.setattr(process.logger, "info", info)
    starting = asyncio.create_task(stub(env={"STUB_DEAF": "1"}).__aenter__())
    await asyncio.wait_for(logged.wait(), 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
