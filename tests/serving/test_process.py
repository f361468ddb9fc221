from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reward_loop._util.process import ParentDeathPipe
from reward_loop._util.web_server import listen, reserve, url_of
from reward_loop.errors import ServerStartError
from reward_loop.serving import process
from reward_loop.serving.process import ServerProcess
from tests.support.servers import STUB_COMMAND, Watched, post, until

pytestmark = pytest.mark.processes


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


@pytest.mark.parametrize("inherits_socket", [True, False])
async def test_a_process_is_ready_inside_the_context_and_ended_after_it(inherits_socket: bool, tmp_path: Path) -> None:
    """A server that does not inherit its socket runs below the reaper, as vLLM and SGLang do."""
    with listen("127.0.0.1") if inherits_socket else reserve("127.0.0.1") as bound:
        own = [] if inherits_socket else ["--port", str(bound.getsockname()[1])]
        for _ in range(2):  # a later run has the same address
            server = ServerProcess("the stub", [*STUB_COMMAND, *own], bound=bound, log_path=tmp_path / "stub.log")
            async with server as process:
                assert process.pid is not None
                below = psutil.Process(process.pid).children()
                assert len(below) == (0 if inherits_socket else 1)
                watched = Watched([process.pid, *(child.pid for child in below)])
                assert await post(url_of(bound), "/echo", b"hello") == (200, b"hello")
                assert os.getsid(process.pid) == process.pid
                assert process.started_in_s is not None
            assert watched.left_after(0) == 0
            watched.close()


async def test_a_later_run_serves_the_same_address_and_what_came_in_between(stub: Any, listener: socket.socket) -> None:
    async with stub() as first:
        os.kill(first.pid, signal.SIGRTMIN + 3)  # a signal without a name
        assert str(await first.wait()).startswith(f"the stub (pid {first.pid}) was killed by signal 37.\n")
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


async def test_an_exit_before_it_is_ready_shows_the_log(stub: Any, tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match="the stub exited with status 3 before it was ready") as raised:
        await stub(env={"STUB_EXIT": "3"}).__aenter__()
    assert str(tmp_path / "stub.log") in str(raised.value)
    assert "    the stub is told to fail" in str(raised.value)


async def test_a_server_that_is_never_ready_is_killed_even_if_it_ignores_sigterm(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_STOPS_WITHIN_S", 0.1)
    server = stub(env={"STUB_DEAF": "SIGTERM"}, start_timeout_s=1.0)
    with pytest.raises(ServerStartError, match="the stub was not ready after 1 s"):
        await server.__aenter__()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


ENGINE = """
import http.server, json, os, pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
core = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ok', flush=True); time.sleep(1000)"
core = subprocess.Popen([sys.executable, "-c", core], start_new_session=True, stdout=subprocess.PIPE)
core.stdout.readline()
pathlib.Path(sys.argv[2]).write_text(json.dumps([os.getpid(), core.pid]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""An engine that ignores SIGTERM, as its core does, which has a session of its own."""


@pytest.mark.parametrize("ends", ["stop", "kill the reaper", "kill the engine"])
async def test_nothing_of_an_engine_is_left(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_STOPS_WITHIN_S", 0.2)
    pids = tmp_path / "pids"
    with reserve("127.0.0.1") as bound:
        command = [sys.executable, "-c", ENGINE, str(bound.getsockname()[1]), str(pids)]
        server = ServerProcess("the engine", command, bound=bound, log_path=tmp_path / "log")
        async with server:
            engine, core = json.loads(pids.read_text())
            watched = Watched([engine, core])
            if ends != "stop":
                assert server.pid is not None
                os.kill(server.pid if ends == "kill the reaper" else engine, signal.SIGKILL)
                await server.wait()
                assert watched.left_after(1) == 0  # before the next run starts
    # Not at once: the kernel may report the end of a killed process a moment after its memory is free.
    assert watched.left_after(1) == 0
    watched.close()


async def test_a_command_that_does_not_exist_is_named(stub: Any) -> None:
    with pytest.raises(ServerStartError, match="no-such-command"):
        await stub(["/no-such-command"]).__aenter__()


async def test_nothing_is_left_of_a_server_if_no_thread_can_wait_for_its_end(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = stub()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(ServerStartError, match=r"can't start new thread \(see `ulimit -u`\)"):
            await server.__aenter__()
    assert not psutil.pid_exists(server.pid)


async def test_a_forked_child_does_not_hold_the_parent_death_pipe() -> None:
    pipe = ParentDeathPipe()
    held = os.dup(pipe.child_fd)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    try:
        pipe.close()
        os.set_blocking(held, False)
        # Without the child's copy the pipe is at its end; with it, this raises BlockingIOError.
        select.select([held], [], [], 60)
        assert os.read(held, 1) == b""
    finally:
        child.kill()
        child.join()
        os.close(held)


async def test_a_long_start_is_logged_with_the_last_line_of_the_servers_log(
    stub: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reward_loop")
    monkeypatch.setattr(process, "_PROGRESS_S", 0.05)
    monkeypatch.setattr(process, "_STOPS_WITHIN_S", 0.1)
    starting = asyncio.create_task(stub(env={"STUB_DEAF": "1"}).__aenter__())
    await until(
        lambda: "the stub is still starting after" in caplog.text and "log line: the stub is deaf" in caplog.text
    )
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
