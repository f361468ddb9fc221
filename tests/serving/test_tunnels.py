"""A tunnel between two nodes, which are both this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from reward_loop.errors import ServerStartError
from reward_loop.serving.tunnels import new_key, tunnel_entry, tunnel_exit
from tests.servers import model_server, post, serving, until

pytestmark = pytest.mark.integration  # starts servers


def _tunnel_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # the process has just died
            if "reward_loop.serving.tunnels" in " ".join(child.cmdline()):
                found.append(child)
    return found


@asynccontextmanager
async def tunnel(url: str, key: str = "key") -> AsyncIterator[tuple[str, str]]:
    """Open a tunnel to a server; yields the URLs of its entry and of its exit."""
    async with (
        tunnel_exit("127.0.0.1", url.removeprefix("http://"), key) as exit_address,
        tunnel_entry(exit_address, key, health_path="/health") as address,
    ):
        yield f"http://{address}", f"http://{exit_address}"


async def test_requests_pass_through_a_tunnel_and_others_do_not() -> None:
    key = new_key()
    async with serving(model_server("judge")) as server, tunnel(server, key) as (url, exit_url):
        answers = await asyncio.gather(*(post(url, "/v1/chat", b"x" * 300_000) for _ in range(20)))
        assert answers == [(200, b"judge")] * 20
        # The exit is open to other machines.
        assert (await post(exit_url, "/v1/chat", b"x"))[0] == 401
        with pytest.raises(ServerStartError, match="401"):
            async with tunnel_entry(urlsplit(exit_url).netloc, "other", health_path="/health"):
                pass
        assert all(key not in " ".join(process.cmdline()) for process in _tunnel_processes())
        assert len(_tunnel_processes()) == 2
    assert _tunnel_processes() == []


async def test_a_client_that_leaves_closes_the_connection_to_the_server() -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["path"] == "/slow":
            began.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as server, tunnel(server) as (url, _):
        request = asyncio.create_task(post(url, "/slow", b"x"))
        await asyncio.wait_for(began.wait(), 60)
        request.cancel()
        await asyncio.wait_for(left.wait(), 60)


async def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\r\n\r\n")
        if b"/health" in line:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            await writer.drain()
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, tunnel(f"http://127.0.0.1:{port}") as (url, _):
        with pytest.raises(aiohttp.ClientError):
            await post(url, "/x")


async def test_an_end_that_dies_comes_back_at_its_address() -> None:
    async with serving(model_server("judge")) as server, tunnel(server) as (url, _):
        before = {process.pid for process in _tunnel_processes()}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len({process.pid for process in _tunnel_processes()} - before) == 2)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await post(url, "/v1/chat", b"x") == (200, b"judge")
                    break
                except aiohttp.ClientError:
                    continue
