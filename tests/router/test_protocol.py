from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from reward_loop.router.protocol import protocol_for
from tests.servers import serving, until

WHOLE = b"POST /a%20b?q=1 HTTP/1.1\r\nHost: h\r\nX-Own: 1\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers in callbacks, when it is told to, what `takes` says, and the rest as an ASGI app."""

    def __init__(self, takes: Callable[[Any], bool] = lambda client: True) -> None:
        self.takes = takes
        self.begun: list[Any] = []
        self.called: list[tuple[str, bytes]] = []
        self.left: list[Any] = []
        self.app: Any = self._echo
        self.received = 0
        """Bytes, of all connections."""

    def begin(self, client: Any) -> bool:
        if not self.takes(client):
            return False
        client.on_leave = lambda: self.left.append(client)
        self.begun.append(client)
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def _echo(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        self.called.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def answer(self, number: int, body: bytes) -> None:
        self.begun[number].answer(200, [(b"content-length", b"%d" % len(body))], body)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(server: Server, keep_alive_s: int = 60) -> AsyncIterator[Connection]:
    def counting(*args: Any, **options: Any) -> Any:
        protocol: Any = protocol_for(1024, server.begin)(*args, **options)
        receive = protocol.data_received

        def count(data: bytes) -> None:
            server.received += len(data)
            receive(data)

        protocol.data_received = count
        return protocol

    async with serving(server, counting, timeout_keep_alive=keep_alive_s) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            yield reader, writer
        writer.close()


async def test_a_request_that_comes_in_one_piece_may_be_served_in_callbacks() -> None:
    server = Server()
    async with connected(server) as (reader, writer):
        for number in range(2):
            writer.write(WHOLE)
            await until(lambda: len(server.begun) > number)  # noqa: B023
            client = server.begun[number]
            assert (client.path, client.target, client.body) == ("/a b", b"/a%20b?q=1", b"ok")
            assert (b"x-own", b"1") in client.headers
            assert (client.scope["raw_path"], client.scope["query_string"]) == (b"/a%20b", b"q=1")
            server.answer(number, b"fine")
            assert (await reader.readuntil(b"fine")).startswith(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
    assert not server.called


async def test_trailers_are_no_headers() -> None:
    server = Server()
    head = b"POST /1 HTTP/1.1\r\nX-Own: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connected(server) as (_, writer):
        writer.write(head + b"2\r\nok\r\n0\r\nX-Own: 2\r\nX-Late: 3\r\n\r\n")
        await until(lambda: server.begun)
    assert server.begun[0].body == b"ok"
    assert server.begun[0].headers == [(b"x-own", b"1"), (b"transfer-encoding", b"chunked")]


async def test_one_that_comes_in_pieces_and_one_that_is_not_taken_are_for_the_app() -> None:
    server = Server(takes=lambda client: client.path != "/app")
    async with connected(server) as (reader, writer):
        writer.write(WHOLE[:-1])
        await until(lambda: server.received == len(WHOLE) - 1)
        writer.write(WHOLE[-1:] + b"GET /app HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"2\r\nok\r\n0\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
    assert server.called == [("/a b", b"ok"), ("/app", b"")]


async def test_requests_that_do_not_wait_for_each_other_are_served_in_their_order() -> None:
    server = Server()
    async with connected(server) as (reader, writer):
        writer.write(WHOLE * 3)
        for number in range(3):
            await until(lambda: len(server.begun) > number)  # noqa: B023
            assert len(server.begun) == number + 1
            server.answer(number, b"fine%d" % number)
            await reader.readuntil(b"fine%d" % number)


REFUSED = b"POST /1 HTTP/1.1\r\nContent-Length: 900000\r\n\r\n"
LONG_HEAD = b"GET / HTTP/1.1\r\nx: " + b"y" * 2000


@pytest.mark.parametrize(("sent", "status"), [(REFUSED, 413), (LONG_HEAD, 431)])
async def test_who_is_refused_while_it_sends_is_not_cut_off(sent: bytes, status: int) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body"})

    server = Server(takes=lambda client: False)
    server.app = refuse
    async with connected(server) as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        # Reset, it might lose the answer, if it had not read it yet.
        writer.write(b"y" * 900_000)
        await until(lambda: server.received == len(sent) + 900_000)


async def test_a_body_that_was_not_asked_for_is_not_waited_for() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    server = Server(takes=lambda client: False)
    server.app = refuse
    async with connected(server) as (reader, writer):
        writer.write(b"POST /1 HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        # The client need not send it now, and its next request would be taken for it.
        assert (await reader.read()).endswith(b"connection: close\r\n\r\n")


async def test_who_serves_a_client_hears_when_it_leaves() -> None:
    server = Server()
    async with connected(server) as (_, writer):
        writer.write(WHOLE)
        await until(lambda: server.begun)
        writer.close()
        await until(lambda: server.left)
    assert server.left == server.begun[:1]


class Transport(asyncio.Transport):
    """One whose other side sends everything at once."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        pass


async def test_who_has_sent_a_long_body_is_still_listened_to_lest_its_leaving_goes_unnoticed() -> None:
    server = Server()
    config = uvicorn.Config(server, log_config=None)
    protocol: Any = protocol_for(1024, server.begin)(config, ServerState(), {})  # type: ignore[call-arg]
    transport = Transport()
    protocol.connection_made(transport)
    protocol.data_received(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
    assert len(server.begun[0].body) == 100_000
    assert transport.reading
    protocol.data_received(WHOLE)
    assert not transport.reading
    server.answer(0, b"ok")
    assert transport.reading
    protocol.connection_lost(None)
    assert server.left == server.begun[1:]


async def test_what_was_begun_in_callbacks_can_go_on_in_a_task() -> None:
    server = Server()
    async with connected(server) as (reader, writer):
        writer.write(WHOLE)
        await until(lambda: server.begun)

        async def late(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"late"})

        server.begun[0].go_on(late)
        assert (await reader.readuntil(b"late\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 503 ")


async def test_a_connection_is_closed_when_it_has_been_idle_and_not_before() -> None:
    server = Server()
    async with connected(server, keep_alive_s=1) as (reader, writer):
        writer.write(WHOLE * 2)
        await until(lambda: server.begun)
        server.answer(0, b"one")
        await reader.readuntil(b"one")
        assert not reader.at_eof()
        server.answer(1, b"two")
        assert (await reader.read()).endswith(b"two")


async def test_a_connection_whose_body_is_refused_is_closed_after_the_keep_alive_timeout() -> None:
    server = Server(takes=lambda client: False)
    async with connected(server, keep_alive_s=1) as (reader, writer):
        # Head and invalid chunk size arrive together: the answer is sent before a response has begun.
        writer.write(b"POST /1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        # The client does not close its side; the server ends the connection, and writing to it fails.
        assert await ends(writer)


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
async def test_who_would_rather_speak_another_protocol_keeps_its_body(at_once: bool) -> None:
    server = Server()
    head = b"POST /1 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nX-Own: 1\r\nContent-Length: 2\r\n\r\n"
    async with connected(server) as (reader, writer):
        writer.write(head if at_once else head[:-4])
        if not at_once:
            await until(lambda: server.received == len(head) - 4)
            writer.write(head[-4:])
        writer.write(b"ok" + WHOLE)
        for number in range(2):
            await until(lambda: len(server.begun) > number)  # noqa: B023
            server.answer(number, b"fine%d" % number)
            await reader.readuntil(b"fine%d" % number)
    assert [(client.path, client.headers[1:2]) for client in server.begun] == [
        ("/1", [(b"x-own", b"1")]),
        ("/a b", [(b"x-own", b"1")]),
    ]


@pytest.mark.parametrize("sent", [b"", WHOLE[:20]])
async def test_a_connection_without_a_request_is_closed_too(sent: bytes) -> None:
    async with connected(Server(), keep_alive_s=0) as (reader, writer):
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
    server = Server()
    async with connected(server) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b'"type":"RouterError"' in answer
    assert not server.begun
