from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from reward_loop._util.web_server import listen
from reward_loop.router import http_server as http_server_module
from reward_loop.router.http_server import ClientRequest, HttpServer
from reward_loop.router.messages import Refusal
from tests.router.transport import Transport
from tests.support.clock import hastened
from tests.support.servers import http_server, until

WHOLE = b"POST /a%20b?q=1 HTTP/1.1\r\nHost: h\r\nX-Own: 1\r\nContent-Length: 2\r\n\r\nok"


class Handler:
    """Reads the body of each request, and answers when the test says so."""

    def __init__(self) -> None:
        self.requests: list[ClientRequest] = []
        self.bodies: list[bytes] = []
        self.cancelled: list[ClientRequest] = []
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, request: ClientRequest) -> None:
        self.requests.append(request)
        try:
            self.bodies.append(await request.read_body(1_000_000))
            body = await self._answers.get()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        request.answer(200, [(b"content-length", b"%d" % len(body))], body)

    def answer(self, body: bytes) -> None:
        self._answers.put_nowait(body)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes in each call of `data_received`. Heads may have 1,024."""
    lengths: list[int] = []
    receive = http_server_module._Connection.data_received

    def count(self: Any, data: bytes) -> None:
        lengths.append(len(data))
        receive(self, data)

    monkeypatch.setattr(http_server_module._Connection, "data_received", count)
    monkeypatch.setattr(http_server_module, "_MAX_HEAD_BYTES", 1024)
    return lengths


@asynccontextmanager
async def connected(handler: Any, keep_alive_s: float = 60) -> AsyncIterator[Connection]:
    async with http_server(handler, keep_alive_s=keep_alive_s) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            yield reader, writer
        writer.close()


async def test_requests_over_one_connection() -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        for number in range(2):
            writer.write(WHOLE)
            handler.answer(b"fine")
            assert await reader.readuntil(b"fine") == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nfine"
            request = handler.requests[number]
            assert (request.path, request.target, request.version) == ("/a b", b"/a%20b?q=1", "1.1")
            assert (b"x-own", b"1") in request.headers
    assert handler.bodies == [b"ok", b"ok"]


async def test_trailers_are_not_headers() -> None:
    handler = Handler()
    head = b"POST /1 HTTP/1.1\r\nX-Own: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connected(handler) as (_, writer):
        writer.write(head + b"2\r\nok\r\n0\r\nX-Own: 2\r\nX-Late: 3\r\n\r\n")
        await until(lambda: handler.bodies)
    assert handler.bodies == [b"ok"]
    assert handler.requests[0].headers == [(b"x-own", b"1"), (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("end", [1, 10, 65])
async def test_a_request_in_two_pieces(end: int, received: list[int]) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(WHOLE[:-end])
        await until(lambda: sum(received) == len(WHOLE) - end)
        writer.write(WHOLE[-end:])
        handler.answer(b"one")
        await reader.readuntil(b"one")
        writer.write(b"GET /next HTTP/1.1\r\n\r\n")
        handler.answer(b"two")
        await reader.readuntil(b"two")
    assert [request.path for request in handler.requests] == ["/a b", "/next"]
    assert handler.bodies == [b"ok", b""]


@pytest.mark.parametrize(
    "early", [WHOLE, WHOLE * 2, b"no HTTP at all\r\n\r\n", b"GET /%b HTTP/1.1\r\n\r\n" % (b"y" * 2000)]
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_of_requests_that_do_not_wait_for_answers_only_the_first_is_answered(
    early: bytes, at_once: bool, received: list[int]
) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        if not at_once:
            writer.write(WHOLE)
            await until(lambda: handler.bodies)
        writer.write(WHOLE + early if at_once else early)
        await until(lambda: sum(received) == len(WHOLE + early))
        handler.answer(b"one")
        assert await reader.read() == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\none"
    assert len(handler.requests) == 1
    assert not handler.cancelled


async def test_a_request_whose_answer_begins_before_its_body_ends_can_be_followed_by_another_one() -> None:
    async def refuse(request: ClientRequest) -> None:
        request.refuse(Refusal(401, "no key"))

    async with connected(refuse) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n")
            await reader.readuntil(b"no key")
            await reader.readuntil(b"}}")
            writer.write(b"x" * 100_000)


async def test_bytes_after_a_last_request_are_ignored() -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n" + WHOLE)
        await until(lambda: handler.bodies)
        handler.answer(b"last")
        assert (await reader.read()).endswith(b"connection: close\r\n\r\nlast")
    assert len(handler.requests) == 1


async def test_an_answer_that_is_not_complete_closes_the_connection() -> None:
    async def half(request: ClientRequest) -> None:
        request.start(200, [])
        await request.write(b"half")

    async with connected(half) as (reader, writer):
        writer.write(WHOLE)
        assert (await reader.read()).endswith(b"\r\n\r\n4\r\nhalf\r\n")


async def test_a_handler_that_fails_is_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: ClientRequest) -> None:
        raise KeyError("x")

    async with connected(fail) as (reader, writer):
        writer.write(WHOLE)
        assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
    assert "POST /a b failed" in caplog.text


REFUSED = b"POST /1 HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"
LONG_HEAD = b"GET / HTTP/1.1\r\nx: " + b"y" * 2000


@pytest.mark.parametrize(("sent", "status"), [(REFUSED, 413), (LONG_HEAD, 431)])
async def test_a_client_that_is_refused_while_it_sends_gets_the_answer(
    sent: bytes, status: int, received: list[int]
) -> None:
    async def refuse(request: ClientRequest) -> None:
        request.refuse(Refusal(413, "too long", close=True))

    async with connected(refuse) as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        # After a reset, the client might lose the answer, if it had not read it yet.
        writer.write(b"y" * 900_000)
        await until(lambda: sum(received) == len(sent) + 900_000)


async def test_a_client_that_disconnects_cancels_its_request() -> None:
    handler = Handler()
    async with connected(handler) as (_, writer):
        writer.write(WHOLE)
        await until(lambda: handler.bodies)
        writer.close()
        await until(lambda: handler.cancelled)
    assert handler.cancelled == handler.requests


@asynccontextmanager
async def without_a_network(handler: Any) -> AsyncIterator[tuple[Any, Transport]]:
    transport = Transport()
    connection: Any = http_server_module._Connection(HttpServer(handler))
    connection.connection_made(transport)
    yield connection, transport
    connection.connection_lost(None)


async def test_a_disconnect_is_noticed_after_a_long_body() -> None:
    handler = Handler()
    async with without_a_network(handler) as (connection, transport):
        connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
        await until(lambda: handler.bodies)
        assert len(handler.bodies[0]) == 100_000
        assert transport.reading  # Only reading detects a disconnect.
    await until(lambda: handler.cancelled)


async def test_a_client_that_does_not_read_its_answers_gets_no_more() -> None:
    handler = Handler()
    async with without_a_network(handler) as (connection, transport):
        connection.data_received(WHOLE)
        connection.pause_writing()
        handler.answer(b"ok")
        await until(lambda: transport.written)
        await asyncio.sleep(0)
        connection.data_received(WHOLE)
        assert b"before the client had read the answer" in transport.written
        connection.data_received(WHOLE)
        await asyncio.sleep(0)
    assert len(handler.requests) == 1


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    ended = asyncio.Event()

    async def handler(request: ClientRequest) -> None:
        request.start(200, [(b"content-length", b"%d" % (20 << 20))])
        try:
            await request.write(b"x" * (20 << 20))
        except asyncio.CancelledError:
            ended.set()
            raise

    async with http_server(handler, keep_alive_s=0.2) as url:
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"), limit=1000)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        async with asyncio.timeout(30):
            await ended.wait()
        writer.close()


async def test_a_connection_is_closed_when_it_has_been_idle_and_not_before() -> None:
    handler = Handler()
    async with connected(handler, keep_alive_s=1) as (reader, writer):
        for body in (b"one", b"two"):
            writer.write(WHOLE)
            handler.answer(body)
            await reader.readuntil(body)
        assert await hastened(reader.read()) == b""


async def test_a_connection_whose_body_is_refused_is_closed_after_the_keep_alive_timeout() -> None:
    async with connected(Handler(), keep_alive_s=1) as (reader, writer):
        # Head and invalid chunk size arrive together, before a task has started.
        writer.write(b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        # The client does not close its side; the server ends the connection, and writing to it fails.
        assert await hastened(ends(writer))


async def ends(writer: asyncio.StreamWriter) -> bool:
    """Writes until the connection is reset."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_request_for_an_upgrade_keeps_its_body(at_once: bool, received: list[int]) -> None:
    handler = Handler()
    head = b"POST /1 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX-Own: 1\r\nContent-Length: 2\r\n\r\n"
    async with connected(handler) as (reader, writer):
        writer.write(head if at_once else head[:-4])
        if not at_once:
            await until(lambda: sum(received) == len(head) - 4)
            writer.write(head[-4:])
        for number, rest in enumerate([b"ok", WHOLE]):
            writer.write(rest)
            handler.answer(b"fine%d" % number)
            await reader.readuntil(b"fine%d" % number)
    assert handler.bodies == [b"ok", b"ok"]
    assert [(request.path, request.headers[1:2]) for request in handler.requests] == [
        ("/1", [(b"x-own", b"1")]),
        ("/a b", [(b"x-own", b"1")]),
    ]


async def test_a_request_for_a_websocket_is_the_last_one_of_its_connection() -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        handler.answer(b"ok")
        assert (await reader.read()).endswith(b"connection: close\r\n\r\nok")


@pytest.mark.parametrize("sent", [b"", WHOLE[:20]])
async def test_a_connection_without_a_request_is_closed_too(sent: bytes) -> None:
    async with connected(Handler(), keep_alive_s=0) as (reader, writer):
        writer.write(sent)
        # It is reset where it was closed before what was sent had come.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 2000, 431),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"y" * 2000), 414),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"y" * 100_000), 414),
        (b"GET /" + b"y" * 2000, 414),
        (b"no HTTP at all\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT x HTTP/1.1\r\n\r\n", 400),
    ],
)
async def test_invalid_and_too_long_heads_are_refused(sent: bytes, status: int) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"type":"RouterError"' in answer
    assert not handler.requests


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2"


@pytest.mark.parametrize("begin", [b"\r\nok\r\n0\r\nx: ", b";"], ids=["trailer", "chunk extension"])
async def test_the_length_of_trailers_and_chunk_extensions_is_bounded(begin: bytes, received: list[int]) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(CHUNKED + begin)
        await until(lambda: handler.requests)
        for _ in range(3):
            before = len(received)
            writer.write(b"y" * 500)
            await until(lambda: len(received) > before)  # noqa: B023
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    assert handler.cancelled == handler.requests


async def test_stop_cancels_the_requests_in_flight() -> None:
    handler = Handler()
    server = HttpServer(handler)
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    server.start(listener)
    async with asyncio.timeout(60):
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        connections[0][1].write(WHOLE)
        await until(lambda: len(handler.bodies) == 1)
        await server.stop()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        for reader, writer in connections:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
    assert len(handler.cancelled) == 1


async def test_clients_are_accepted_once_others_have_been_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, opened = Handler(), asyncio.Event()
    loop = asyncio.get_running_loop()
    connect = loop.connect_accepted_socket

    async def connect_slowly(*arguments: Any) -> object:
        connection = await connect(*arguments)
        await opened.wait()
        return connection

    monkeypatch.setattr(loop, "connect_accepted_socket", connect_slowly)
    server = HttpServer(handler, max_connections=4)
    with listen("127.0.0.1", 0) as listener:
        server.start(listener)
        async with asyncio.timeout(30):
            clients = [await asyncio.open_connection(*listener.getsockname()) for _ in range(3)]
            clients[0][1].write(WHOLE)
            await until(lambda: len(handler.bodies) == 1)
            opened.set()
            clients[2][1].write(WHOLE)
            await until(lambda: len(handler.bodies) == 2)
            await server.stop()
    for _, writer in clients:
        writer.close()


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 2\r\nContent-Length: 2",
        b"Content-Length: 2, 2",
        b"Content-Length: -2",
        b"Content-Length: +2",
        b"Content-Length : 2",
        b"Content-Length:\r\n 2",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: xchunked",
        b"X: a\r\n b",
        b"X: a\x00b",
        b"X: a\rb",
        b"X: a\nY: b",
        b": a",
    ],
)
async def test_requests_that_servers_could_delimit_differently_are_refused(lines: bytes) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\n%b\r\n\r\n0\r\n\r\n" % lines)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert not handler.bodies


@pytest.mark.parametrize("body", [b"zz\r\n", b"0x2\r\nok\r\n", b"2\r\nokX0\r\n", b"fffffffffffffffff\r\nok", b"-1\r\n"])
async def test_invalid_chunks_are_refused(body: bytes) -> None:
    handler = Handler()
    async with connected(handler) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert not handler.bodies


async def test_stop_ends_although_a_request_ignores_its_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server_module, "_ABORT_S", 0.01)
    started, may_end = asyncio.Event(), asyncio.Event()

    async def ignore_cancellation(request: ClientRequest) -> None:
        started.set()
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    server = HttpServer(ignore_cancellation)
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        server.start(listener)
        _, writer = await asyncio.open_connection(*address)
        writer.write(WHOLE)
        await started.wait()
        async with asyncio.timeout(30):
            await server.stop()
        assert "1 requests did not end within 0.01 s" in caplog.text
        may_end.set()
        writer.close()
