"""Test helpers: ASGI apps on real sockets, the command of the stub server, and waiting for processes to end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI

from reward_loop._util.web_server import listen, url_of
from reward_loop.router.app import Router
from reward_loop.router.config import RouterConfig
from reward_loop.router.http_server import ClientRequest, HttpServer
from tests.support.clock import until as until

STUB_COMMAND = [sys.executable, str(Path(__file__).with_name("stub_server.py"))]


@contextlib.asynccontextmanager
async def serving(
    app: Any, http: Any = "httptools", listener: socket.socket | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serve an ASGI app on this event loop; yields its URL."""
    listener = listener or listen("127.0.0.1")
    lifespan = "on" if isinstance(app, FastAPI) else "off"
    options |= {"log_level": "error", "date_header": False, "server_header": False}
    config = uvicorn.Config(app, http=http, lifespan=lifespan, **options)
    config.load()
    # Not `serve`: it asks ten times a second whether to stop, and sleeps to stop, 0.2 s for each server of each test.
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield url_of(listener)
    finally:
        server.servers[0].close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await until(lambda: not server.server_state.connections and not server.server_state.tasks)
        await server.lifespan.shutdown()


@contextlib.asynccontextmanager
async def served_by_router(router: Router, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve the router; yields its URL."""
    async with router, http_server(router, listener) as url:
        yield url


@contextlib.asynccontextmanager
async def http_server(
    handler: Callable[[ClientRequest], Awaitable[None]], listener: socket.socket | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serve requests with the router's HTTP server; yields its URL."""
    server = HttpServer(handler, **options)
    listener = listener or listen("127.0.0.1")
    url = url_of(listener)
    server.start(listener)
    try:
        yield url
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def resetting() -> AsyncIterator[str]:
    """Run a server that reads a request and then closes the connection; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, sock=(listener := listen("127.0.0.1")))
    async with server:
        yield url_of(listener)


@functools.cache
def _bound() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def refusing() -> str:
    """Return the URL of a port that refuses connections. It is bound, so that no other process can listen on it."""
    return url_of(_bound())


async def post(url: str, path: str = "/", body: bytes = b"", **options: Any) -> tuple[int, bytes]:
    """Send a POST request on a new connection, and return status and body."""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(url + path, data=body, **options) as response,
    ):
        return response.status, await response.read()


CHAT = "/v1/chat/completions"


def model_server(name: str, seen: list[Any] | None = None, status: int = 200, headers: Any = ()) -> Any:
    """Return an ASGI app that lists the model ``name``. Health checks get status 200, other requests ``status``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        body = name.encode()
        answer = 200
        if scope["path"] == "/v1/models":
            body = orjson.dumps({"object": "list", "data": [{"id": name, "object": "model"}]})
        elif scope["path"] not in ("/health", "/is_sleeping"):
            answer = status
            if seen is not None:
                seen.append(dict(scope["headers"]))
        raw = [(b"content-length", b"%d" % len(body)), *headers]
        await send({"type": "http.response.start", "status": answer, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return app


@asynccontextmanager
async def routed_urls(urls: list[str], **options: Any) -> AsyncIterator[str]:
    """Run the router in front of servers; when all are up, yields its URL."""
    async with served_by_router(Router(urls, RouterConfig(**options))) as url, aiohttp.ClientSession(url) as session:
        async with asyncio.timeout(30):
            while [w["state"] for w in await listed(session)] != ["up"] * len(urls):  # noqa: ASYNC110
                await asyncio.sleep(0)
        yield url


@asynccontextmanager
async def routed(*workers: Any, wait_for: int | None = None, **options: Any) -> Any:
    """Run the router with ASGI apps as backends; when all are up, yields its URL, the backend URLs and a session."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
        url = await stack.enter_async_context(served_by_router(Router(urls, RouterConfig(**options))))
        headers = {"authorization": f"Bearer {options['api_key']}"} if "api_key" in options else {}
        session = await stack.enter_async_context(aiohttp.ClientSession(url, headers=headers))
        async with asyncio.timeout(30):
            while [w["state"] for w in await listed(session)] != ["up"] * len(urls):  # noqa: ASYNC110
                await asyncio.sleep(0)
        yield url, urls, session


async def listed(session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    async with session.get("/workers") as response:
        workers: list[dict[str, Any]] = await response.json()
        return workers


class Watched:
    """Watches some processes by pidfd, so that their end cannot be missed."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the process has already ended
                self._fds.append(os.pidfd_open(pid))

    def left_after(self, seconds: float = 60) -> int:
        """Return how many processes still run after ``seconds``, or 0 as soon as all have ended."""
        deadline = time.monotonic() + seconds
        left = list(self._fds)
        while left:
            ended, _, _ = select.select(left, [], [], max(0, deadline - time.monotonic()))
            if not ended:
                break
            left = [fd for fd in left if fd not in ended]
        return len(left)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
