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

from reward_loop._util import uvicorn_limits
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
from tests.support.servers import serving


def test_addresses() -> None:
    with listen("127.0.0.1") as own, listen("0.0.0.0") as everyones:
        assert is_loopback(own)
        assert not is_loopback(everyones)
        assert url_of(own).startswith("http://127.0.0.1:")
    left, right = socket.socketpair()
    with left, right:
        assert is_loopback(left)


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


def test_the_key_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setenv("NO_KEY", "")
    assert api_key(None) is None
    assert api_key("A_KEY") == "secret"
    for name in ("NO_KEY", "NOT_SET"):
        with pytest.raises(ConfigError, match=f"--api-key-env {name}: this environment variable is not set"):
            api_key(name)


def test_an_address_needs_a_key_beyond_loopback_and_a_free_port() -> None:
    with pytest.raises(ConfigError, match="--api-key-env"):
        open_listener("0.0.0.0", 0, None)
    with open_listener("0.0.0.0", 0, "secret") as listener:
        assert not is_loopback(listener)
    with open_listener("127.0.0.1", 0, None) as listener:
        assert is_loopback(listener)
        port = listener.getsockname()[1]
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


class LimitedServer:
    """A server of which a test reads all bytes."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))

    async def answer(self, *messages: bytes) -> bytes:
        """Return what the server sends until it closes the connection."""
        reader, writer = await asyncio.open_connection(*self.address)
        async with asyncio.timeout(30):
            answer = b""
            for message in messages:
                writer.write(message)
                if message.endswith(b"\r\n\r\n"):
                    answer += await reader.readuntil(b"ok")
            with contextlib.suppress(ConnectionError):
                answer += await reader.read()
        writer.close()
        return answer


async def ok(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (b"GET / HT",),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\n1",),
        (GET, b"\r\n"),
        (GET, b"GET / HT"),
        (GET,),
    ],
    ids=["silent", "half a head", "half a body", "a line after an answer", "half a second head", "idle"],
)
async def test_connections_without_a_complete_request_are_closed(
    messages: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_limits, "KEEP_ALIVE_S", 0.2)
    async with serving(ok, http=uvicorn_limits.LimitedHttp, timeout_keep_alive=1) as url:
        answer = await LimitedServer(url).answer(*messages)
        assert answer.count(b"200 OK") == messages.count(GET)


async def test_a_long_answer_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_limits, "KEEP_ALIVE_S", 0.05)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await ok(scope, receive, send)

    async with serving(slow, http=uvicorn_limits.LimitedHttp, timeout_keep_alive=1) as url:
        assert (await LimitedServer(url).answer(GET)).endswith(b"ok")


async def test_heads_are_bounded_and_bodies_are_not() -> None:
    async with serving(ok, http=uvicorn_limits.LimitedHttp) as url:
        long = b"GET / HTTP/1.1\r\nhost: h\r\n" + b"".join(b"x%d: %s\r\n" % (n, b"y" * 900) for n in range(1200))
        reader, writer = await asyncio.open_connection(*LimitedServer(url).address)
        async with asyncio.timeout(30):
            writer.write(long)
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        body = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\nconnection: close\r\n\r" % (4 << 20)
        assert (await LimitedServer(url).answer(body, b"\n" + b"z" * (4 << 20))).endswith(b"ok")
