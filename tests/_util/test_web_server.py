from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from reward_loop._util.web_server import (
    api_key,
    is_loopback,
    listen,
    open_listener,
    reserve,
    serve_until_signal,
    stop_on_disconnect,
    url_of,
)
from reward_loop.errors import ConfigError
from tests.support.gsm8k import ROOT


def test_a_reserved_port_can_be_bound_by_who_names_it_again_and_again() -> None:
    with reserve("127.0.0.1") as reservation:
        port = reservation.getsockname()[1]
        for _ in range(2):
            with listen("127.0.0.1", port) as own:
                assert own.getsockname()[1] == port


def test_an_app_that_fails_to_start_is_not_served() -> None:
    program = """
import argparse

from reward_loop._util.web_server import add_arguments, serve

async def app(scope, receive, send):
    raise RuntimeError("no room")

parser = argparse.ArgumentParser()
add_arguments(parser)
serve(app, parser.parse_args([]), "the app")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode not in (0, None)
    assert "RuntimeError: no room" in ended.stderr


def test_a_key_whose_environment_variable_is_not_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_KEY", "")
    assert api_key(None) is None
    for name in ("NO_KEY", "NOT_SET"):
        with pytest.raises(ConfigError, match=f"--api-key-env {name}: this environment variable is not set"):
            api_key(name)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_to_dead_machines_are_closed_by_the_kernel(host: str) -> None:
    with listen(host) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [accepted.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [60, 12, 5]


def test_an_address_needs_a_key_beyond_loopback_and_a_free_port() -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        open_listener("0.0.0.0", 0, None)
    with open_listener("0.0.0.0", 0, "secret") as listener:
        assert not is_loopback(listener)
    with open_listener("127.0.0.1", 0, None) as listener:
        assert is_loopback(listener)
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"--port {port}: .* --port 0"):
            open_listener("127.0.0.1", port, None)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_server_handles_signals_stops_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = uvicorn.Server.run

    def run_after_signal(server: uvicorn.Server, sockets: Any) -> None:
        signal.raise_signal(number)
        run(server, sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run_after_signal)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with open_listener("127.0.0.1", 0, None) as listener:
            serve_until_signal(FastAPI(), listener, on_signal=lambda stop: stop(), grace_s=1)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)


BLOCKED = """
import asyncio
from reward_loop._util import web_server

web_server._SAME_S = 0

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        return
    print("blocked", flush=True)
    while True:
        pass

with web_server.open_listener("127.0.0.1", 0, None) as listener:
    print(listener.getsockname()[1], flush=True)
    web_server.serve_until_signal(app, listener, on_signal=lambda stop: stop(), grace_s=1)
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_third_signal_ends_a_server_whose_event_loop_is_blocked(number: signal.Signals) -> None:
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout
        try:
            with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert server.stdout.readline() == "blocked\n"
                for _ in range(300):
                    server.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        server.wait(0.1)
                        break
                _, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 130
    assert re.search(r"Interrupted again in app \(<string>:\d+\)", errors)


async def test_work_is_cancelled_if_the_client_disconnects_first() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    cancelled = asyncio.Event()

    async def ends() -> None:
        pass

    async def fails() -> None:
        raise KeyError("x")

    async def waits() -> None:
        await messages.put({"type": "http.request"})
        await messages.put({"type": "http.disconnect"})
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert await stop_on_disconnect(messages.get, ends)
    with pytest.raises(KeyError):
        await stop_on_disconnect(messages.get, fails)
    assert not await stop_on_disconnect(messages.get, waits)
    assert cancelled.is_set()
