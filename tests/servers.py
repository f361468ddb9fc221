"""Helpers of this directory's tests: ASGI apps on real sockets, stub servers in processes, and whether one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI

from reward_loop._util.sockets import listen, url_of
from reward_loop.router.app import Router, create_app
from reward_loop.router.config import RouterConfig
from reward_loop.router.protocol import protocol_for
from reward_loop.router.proxy import Proxy

STUB_COMMAND = [sys.executable, str(Path(__file__).with_name("stub_server.py"))]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: Any, http: Any = "httptools", listener: socket.socket | None = None, **options: Any
) -> AsyncIterator[str]:
    """Serves an ASGI app on this loop; yields its URL."""
    listener = listener or listen("127.0.0.1")
    lifespan = "on" if isinstance(app, FastAPI | Router) else "off"
    options |= {"log_level": "error", "date_header": False, "server_header": False}
    server = _Server(uvicorn.Config(app, http=http, lifespan=lifespan, **options))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task


IN_TASKS = False
"""Whether the router's app is served with a task for each request, as any ASGI server would, or as the router does."""


def served_by_router(app: Proxy | Router) -> contextlib.AbstractAsyncContextManager[str]:
    """Serves the router's app; yields its URL."""
    return serving(app) if IN_TASKS else serving(app, protocol_for(65536, app.begin))


@contextlib.asynccontextmanager
async def resetting() -> AsyncIterator[str]:
    """A server that reads a request and then closes the connection; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, sock=(listener := listen("127.0.0.1")))
    async with server:
        yield url_of(listener)


async def until(condition: Callable[[], Any]) -> None:
    """Lets the loop run until something is the case."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event of its own)
            await asyncio.sleep(0)


@functools.cache
def _bound() -> socket.socket:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound


def refusing() -> str:
    """The URL of a port that nobody listens on: it is taken, so that no other process can."""
    return url_of(_bound())


async def post(url: str, path: str = "/", body: bytes = b"", **options: Any) -> tuple[int, bytes]:
    """One request on a connection of its own; returns status and body."""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(url + path, data=body, **options) as response,
    ):
        return response.status, await response.read()


CHAT = "/v1/chat/completions"


def model_server(name: str, seen: list[Any] | None = None, status: int = 200, headers: Any = ()) -> Any:
    """Lists one model, and answers with its name, or with a status once it is up."""

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
async def routed(*workers: Any, wait_for: int | None = None, **options: Any) -> Any:
    """The router in front of ASGI apps, once all of them are in use; yields its URL and theirs."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(worker)) for worker in workers]
        url = await stack.enter_async_context(served_by_router(create_app(urls, RouterConfig(**options))))
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
    """Some processes, watched from before they end."""

    def __init__(self, pids: list[int]) -> None:
        self._fds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._fds.append(os.pidfd_open(pid))

    def left_after(self, seconds: float = 60) -> int:
        """How many are still there; returns as soon as none is."""
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
