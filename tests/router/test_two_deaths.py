"""Requests during which servers die, with engines that die of a text and are restarted."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from reward_loop._util.web_server import reserve, url_of
from tests.support.clock import hastened
from tests.support.servers import CHAT, listed, post, routed_urls

POISON = b"a text of which engines die"


class Engine:
    """A server that dies of `POISON`, and starts again on the same address when the router has seen the death.

    Args:
        dies_with: what its clients get when it dies: a closed connection, or the status 500.
        together: requests in flight at the same time before it does anything, until it dies.
        resets: new connections that the socket of the dead server accepts and resets, at each death.
    """

    def __init__(self, dies_with: int | None = None, together: int = 1, resets: int = 0) -> None:
        with reserve("127.0.0.1") as reservation:
            self.url = url_of(reservation)
            self._address = reservation.getsockname()
        self.deaths = 0
        self.router = ""
        """The URL of the router in front of it."""
        self.harmless_after = math.inf
        """The number of deaths after which nothing kills it."""
        self._dies_with = dies_with
        self._together = together
        self._resets = resets
        self._to_reset = 0
        self._has_reset = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._waiting = 0
        self._enough = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._waiting, self._enough = 0, asyncio.Event()
        self._server = await asyncio.start_server(self._serve, *self._address, reuse_address=True)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._close()

    def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _die(self) -> None:
        self.deaths, self._together = self.deaths + 1, 1
        if self._dies_with:
            for writer in list(self._open):
                writer.write(b"HTTP/1.1 %d Error\r\ncontent-length: 0\r\n\r\n" % self._dies_with)
        if self._resets:
            self._to_reset, self._has_reset = self._resets, asyncio.Event()
            for writer in list(self._open):
                writer.transport.abort()
            await self._has_reset.wait()
        self._close()
        async with aiohttp.ClientSession(self.router) as session:
            while {w["url"]: w["state"] for w in await listed(session)}[self.url] == "up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._to_reset:
            self._to_reset -= 1
            writer.transport.abort()
            if not self._to_reset:
                self._has_reset.set()
            return
        self._open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    (int(line[15:]) for line in head.lower().splitlines() if line[:15] == b"content-length:"), 0
                )
                body = await reader.readexactly(size)
                if size:
                    self._waiting += 1
                    if self._waiting >= self._together:
                        self._enough.set()
                    await self._enough.wait()
                if POISON in body and self.deaths < self.harmless_after:
                    task = asyncio.create_task(self._die())
                    self._tasks.add(task)
                    return
                if size:
                    await asyncio.sleep(0.02)  # the other requests are still in flight when it dies
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        self._open.discard(writer)
        writer.close()


@contextlib.asynccontextmanager
async def engines(count: int, **options: Any) -> AsyncIterator[tuple[str, list[Engine]]]:
    found = [Engine(**options) for _ in range(count)]
    for engine in found:
        await engine.start()
    try:
        async with routed_urls([engine.url for engine in found]) as url, asyncio.timeout(60):
            for engine in found:
                engine.router = url
            yield url, found
    finally:
        for engine in found:
            await engine.stop()


@pytest.mark.parametrize("dies_with", [None, 500], ids=["connection", "500"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("used_connections", [False, True])
async def test_a_request_during_which_two_servers_die_is_refused(
    count: int, dies_with: int | None, used_connections: bool
) -> None:
    async with engines(count, dies_with=dies_with) as (url, found):
        if used_connections:
            await asyncio.gather(*(post(url, CHAT, b"harmless") for _ in range(4 * count)))
        status, answer = await post(url, CHAT, POISON)
        deaths = sum(engine.deaths for engine in found)
        if status == 500:  # nobody else could be asked
            assert (count, deaths) == (1, 1)
        else:
            error = orjson.loads(answer)["error"]
            assert (status, error["code"], deaths) == (422, "request_breaks_servers", 2)
            assert all(engine.url in error["message"] for engine in found if engine.deaths)
        assert await post(url, CHAT, b"harmless") == (200, b"harmless")


@pytest.mark.parametrize("used_connections", [False, True])
async def test_a_death_that_breaks_two_connections_counts_once(used_connections: bool) -> None:
    async with engines(1, resets=1) as (url, [engine]):
        if used_connections:
            await asyncio.gather(*(post(url, CHAT, b"harmless") for _ in range(4)))
        engine.harmless_after = 1
        assert await post(url, CHAT, POISON) == (200, POISON)
        assert engine.deaths == 1


async def test_other_requests_on_a_server_that_died_are_answered() -> None:
    async with engines(3, together=4) as (url, found):
        bodies = [POISON, *(b"harmless %d" % number for number in range(23))]
        answers = await asyncio.gather(*(post(url, CHAT, body) for body in bodies))
        assert answers[0][0] == 422
        # Those that were on both servers may be the cause, too.
        assert {status for status, _ in answers[1:]} <= {200, 422}
        assert sum(status == 200 for status, _ in answers) > 6
        assert sum(engine.deaths for engine in found) == 2


async def test_connections_that_are_only_reset_are_no_deaths() -> None:
    resets = 3

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST") and resets:
            resets -= 1
            writer.transport.abort()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, routed_urls([url_of(server.sockets[0])]) as url:
        assert await hastened(post(url, CHAT, b"x")) == (200, b"ok")
