from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reward_loop.router.backend import Backend
from reward_loop.router.config import BackendConfig, RouterConfig
from reward_loop.router.http_client import BackendAnswer, BrokenError, ConnectError, StaleError
from reward_loop.router.http_server import ClientRequest
from reward_loop.router.messages import RawHeader, Refusal
from reward_loop.router.pool import BackendPool
from reward_loop.router.proxy import Proxy
from tests.router.transport import Transport
from tests.support.clock import hastened


def answer(status: int, **headers: str) -> BackendAnswer:
    whole = BackendAnswer(None)  # type: ignore[arg-type]
    whole.status = status
    whole.headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    whole.headers.append((b"content-length", b"0"))
    whole.complete = True
    return whole


OF_THE_FIRST = b"x-reward-loop-backend: http://0:1\r\n"


PATH, GROUP = b"/v1/chat/completions", (b"x-reward-loop-group", b"7")


class Scripted:
    """Stands for a server: gives what it was told to, in turn, and the last thing for ever."""

    reads = 0

    def __init__(self, *outcomes: BackendAnswer | Exception) -> None:
        self.outcomes = list(outcomes)
        self.asked = 0

    async def request(self, *request: bytes) -> BackendAnswer:
        self.asked += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        pass


class Caller:
    """Asks servers in turn, the first one first."""

    def __init__(self, pool: BackendPool, config: RouterConfig) -> None:
        self.pool = pool
        self.proxy = Proxy(pool, config)

    async def ask(self, *headers: RawHeader) -> int:
        return int((await self.answer("1.1", *headers)).split(b" ")[1])

    async def answer(self, version: str = "1.1", *headers: RawHeader) -> bytes:
        transport, writable = Transport(), asyncio.Event()
        writable.set()
        every = [GROUP, *headers]
        client = ClientRequest(transport, writable, "POST", PATH, version, every, keep_alive=version != "1.0")
        client.end_body()
        await self.proxy(client)
        return transport.written


@asynccontextmanager
async def calling(*servers: Scripted, **options: Any) -> AsyncIterator[Caller]:
    config = RouterConfig(**options)

    async def well(backend: Backend) -> None:
        pass

    urls = [f"http://{number}:1" for number in range(len(servers))]
    async with BackendPool([BackendConfig(url=url) for url in urls], well, config) as pool:
        for _ in range(len(urls)):
            await pool.acquire()
        for backend, server in zip(pool.backends, servers, strict=True):
            backend.upstream = server  # type: ignore[assignment]
        yield Caller(pool, config)


@pytest.mark.parametrize("failure", [answer(500), answer(503), answer(429), BrokenError("x"), ConnectError("x")])
async def test_another_server_is_asked(failure: BackendAnswer | Exception) -> None:
    async with calling(Scripted(failure), Scripted(answer(200))) as caller:
        assert [await caller.ask() for _ in range(2)] == [200, 200]
        assert [backend.in_flight for backend in caller.pool.backends] == [0, 0]
        assert sum(backend.retries for backend in caller.pool.backends) == 1


async def test_after_a_stale_connection_another_server_is_asked_and_both_stay_in_use() -> None:
    servers = [Scripted(StaleError("x"), answer(200)) for _ in range(2)]
    # By the policy alone, the next attempt would go to the same server again, which may be dead.
    async with calling(*servers, policy="affinity") as caller:
        assert await caller.ask() == 200
        assert sorted(server.asked for server in servers) == [1, 2]
        assert all(backend.up for backend in caller.pool.backends)


async def test_attempts_are_counted_and_the_last_failure_is_passed_on() -> None:
    servers = [Scripted(answer(500)) for _ in range(5)]
    async with calling(*servers) as caller:
        assert await caller.ask() == 500
    assert sum(server.asked for server in servers) == 4


async def test_broken_connections_use_up_attempts_and_refused_ones_do_not() -> None:
    async with calling(Scripted(ConnectError("x"), BrokenError("x"))) as caller:
        with pytest.raises(Refusal, match="4 connections to servers broke") as refused:
            await hastened(caller.ask())
        assert refused.value.status == 502
        assert caller.pool.backends[0].upstream.asked == 5  # type: ignore[attr-defined]


async def test_a_server_that_asks_for_a_pause_stays_in_use_and_the_client_gets_its_answer() -> None:
    busy = Scripted(answer(503, retry_after="7"))
    async with calling(busy, Scripted(answer(200))) as caller:
        assert [await caller.ask() for _ in range(4)] == [200] * 4
        assert [backend.failures for backend in caller.pool.backends] == [0, 0]
    async with calling(busy) as caller:
        assert b"\r\nretry-after: 7\r\n" in await caller.answer()


def unfinished(*parts: bytes) -> BackendAnswer:
    begun = BackendAnswer(None)  # type: ignore[arg-type]
    begun.status = 200
    begun.headers = [(b"x-own", b"1")]
    for part in parts:
        begun.add(part)
    return begun


@pytest.mark.parametrize(
    ("version", "rest"),
    [
        ("1.1", b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n"),
        ("1.0", b"content-length: 2\r\nconnection: close\r\n\r\nab"),
    ],
)
async def test_an_answer_of_unknown_length_is_streamed_but_to_http_1_0_sent_at_once(version: str, rest: bytes) -> None:
    given = unfinished(b"a")
    async with calling(Scripted(given)) as caller:
        asking = asyncio.create_task(caller.answer(version))
        await asyncio.sleep(0)
        given.add(b"b")
        given.complete = True
        given.wake()
        assert await asking == b"HTTP/1.1 200 OK\r\nx-own: 1\r\n" + OF_THE_FIRST + rest


async def test_a_complete_answer_of_unknown_length_gets_its_length() -> None:
    given = unfinished(b"ab")
    given.complete = True
    async with calling(Scripted(given)) as caller:
        assert (
            await caller.answer() == b"HTTP/1.1 200 OK\r\nx-own: 1\r\n" + OF_THE_FIRST + b"content-length: 2\r\n\r\nab"
        )


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_has_no_length(status: int) -> None:
    async with calling(Scripted(answer(status))) as caller:
        assert b"content-length" not in await caller.answer()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_server_that_answers_others_stays_in_use_and_its_refusals_are_passed_on(status: int) -> None:
    is_over = asyncio.Event()

    class Full(Scripted):
        async def request(self, *request: bytes) -> BackendAnswer:
            self.asked += 1
            if self.asked == 1:
                await is_over.wait()
                return answer(200)
            return answer(status)

    async with calling(Full(answer(status)), health_interval_s=1000) as caller:
        other = asyncio.create_task(caller.ask())
        await asyncio.sleep(0)
        assert [await caller.ask() for _ in range(5)] == [status] * 5
        [backend] = caller.pool.backends
        assert (backend.up, backend.failures) == (True, 0)
        is_over.set()
        assert await other == 200


async def test_a_full_server_does_not_keep_requests_from_another_one() -> None:
    full = Scripted(answer(503))
    async with calling(full, Scripted(answer(200)), health_interval_s=1000) as caller:
        caller.pool.backends[0].begin()
        assert [await caller.ask() for _ in range(6)] == [200] * 6
        assert (full.asked, caller.pool.backends[0].failures) == (3, 0)
