from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_loop._util.web_server import listen, url_of
from reward_loop.router.http_client import BackendAnswer, BrokenError, ConnectError, StaleError, Upstream
from tests.support.servers import refusing, until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture(autouse=True)
def _idle_connections_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a busy machine delays a test for seconds."""
    monkeypatch.setattr("reward_loop.router.http_client._IDLE_S", 600.0)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw(serve: Serve) -> AsyncIterator[Upstream]:
    """A client of a server that is written out byte by byte."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(closing, sock=(listener := listen("127.0.0.1")))
    async with server:
        upstream = Upstream(url_of(listener))
        try:
            yield upstream
        finally:
            upstream.close()


def saying(*answers: bytes) -> Serve:
    """Answers the requests on each connection one by one, then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

    return serve


async def get(upstream: Upstream, method: bytes = b"GET") -> tuple[int, bytes]:
    answer = await upstream.request(method, b"/")
    return answer.status, await whole(answer)


async def whole(answer: BackendAnswer) -> bytes:
    parts = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("written", "status", "body"),
    [
        (OK, 200, b"ok"),
        (b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", 304, b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n1\r\n!\r\n0\r\nx: 1\r\n\r\n", 200, b"ok!"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx", 200, b"x"),
        (b"HTTP/1.1 418 Odd One\r\nConnection: close\r\ncontent-length: 0\r\n\r\n", 418, b""),
    ],
)
async def test_valid_http_answers_are_read(written: bytes, status: int, body: bytes) -> None:
    async with raw(saying(written)) as upstream:
        assert await get(upstream) == (status, body)


async def test_answers_lose_only_what_is_about_the_connection() -> None:
    said = b"HTTP/1.1 200 OK\r\nX-Own: 1\r\nX-Hop: 2\r\nKeep-Alive: x\r\nConnection: x-hop\r\ncontent-length: 0\r\n\r\n"
    async with raw(saying(said)) as upstream:
        answer = await upstream.request(b"GET", b"/")
    assert answer.headers == [(b"x-own", b"1"), (b"content-length", b"0")]


@pytest.mark.parametrize(("body", "connections"), [(b"", 1), (b"x" * 99, 2)])
async def test_the_connection_of_a_head_is_used_again_unless_a_body_came(body: bytes, connections: int) -> None:
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + body if head.startswith(b"HEAD") else OK)

    async with raw(serve) as upstream:
        assert await get(upstream, b"HEAD") == (200, b"")
        assert await get(upstream) == (200, b"ok")
        assert await get(upstream, b"HEAD") == (200, b"")
        assert count == connections


@pytest.mark.parametrize(
    "written",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", b"SSH-2.0\r\n", b"HTTP/1.1 101 X\r\nUpgrade: x\r\n\r\n"],
)
async def test_an_incomplete_answer_is_an_error(written: bytes) -> None:
    async with raw(saying(written)) as upstream:
        with pytest.raises(BrokenError):
            await get(upstream)


@pytest.mark.parametrize("status", [b"042", b"000", b"099", b"101", b"600", b"999", b"1200", b"2x0", b""])
async def test_an_invalid_status_is_an_error_at_once(status: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b Odd\r\ncontent-length: 2\r\n\r\nok" % status)
        await reader.read()  # The connection stays open.

    async with raw(serve) as upstream, asyncio.timeout(30):
        with pytest.raises(BrokenError, match="not valid HTTP"):
            await get(upstream)


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 1024),
        (b"HTTP/1.1 200 OK\r\n", b"x: %b\r\n" % (b"y" * 1020)),
        (b"HTTP/1.1 200 " + b"O" * 1024, b"K" * 1024),
        (b"", b"HTTP/1.1 102 Processing\r\nx: %b\r\n\r\n" % (b"y" * 1000)),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: ", b"y" * 1024),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;", b"y" * 1024),
    ],
    ids=["one header", "many headers", "reason", "interim answers", "trailer", "chunk extension"],
)
async def test_the_length_of_an_answers_head_is_bounded(begin: bytes, part: bytes) -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begin)
        while written < 32 << 20:
            writer.write(part)
            await writer.drain()
            written += len(part)

    async with raw(serve) as upstream, asyncio.timeout(60):
        with pytest.raises(BrokenError, match="longer than 65536 bytes"):
            await get(upstream)
    assert written < 16 << 20  # What the sockets hold is far less.


async def test_a_stream_of_many_small_parts_has_no_bound() -> None:
    chunks = b"1\r\nx\r\n" * 40_000
    async with raw(
        saying(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    ) as upstream:
        assert await get(upstream) == (200, b"x" * 40_000)


async def test_a_stream_that_breaks_off_is_an_error_in_its_middle() -> None:
    async with raw(saying(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")) as upstream:
        answer = await upstream.request(b"GET", b"/")
        assert await answer.read() == b"ok"
        with pytest.raises(BrokenError):
            await answer.read()


async def test_nobody_there() -> None:
    for url in (refusing(), "http://a..b"):
        with pytest.raises(ConnectError):
            await get(Upstream(url))


async def test_a_lack_of_file_descriptors_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, refused = asyncio.get_running_loop().create_connection, []

    async def once_refused(*args: Any, **options: Any) -> Any:
        if not refused:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(*args, **options)

    async with raw(saying(OK)) as upstream:
        monkeypatch.setattr(upstream.loop, "create_connection", once_refused)
        assert await get(upstream) == (200, b"ok")
    assert refused


async def test_a_connection_that_dies_when_it_is_used_again_is_stale() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # It has the request, and closes without a byte.

    async with raw(serve) as upstream:
        for _ in range(2):
            assert await get(upstream) == (200, b"ok")
            with pytest.raises(StaleError):
                await get(upstream)


async def test_bytes_after_an_answer_are_not_the_answer_to_the_next_request() -> None:
    async with raw(saying(OK + OK.replace(b"ok", b"no"))) as upstream:
        assert [await get(upstream) for _ in range(2)] == [(200, b"ok")] * 2


@pytest.mark.parametrize("surplus", [b"H", OK[:20], OK[:-3]])
async def test_a_connection_with_the_beginning_of_another_answer_is_not_used_again(surplus: bytes) -> None:
    async with raw(saying(OK + surplus)) as upstream:
        assert await get(upstream) == (200, b"ok")
        assert not upstream._idle


async def test_cancelling_a_request_whose_answer_is_complete_does_not_close_the_connection() -> None:
    async with raw(saying(OK, OK, OK)) as upstream:
        await get(upstream)
        (connection,) = upstream._idle
        first = asyncio.create_task(get(upstream))
        await until(lambda: upstream.busy)
        # The whole answer arrives, and the request is cancelled before its task runs.
        connection.data_received(OK)
        second = asyncio.create_task(get(upstream))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == (200, b"ok")


async def test_a_cancelled_request_closes_its_connection() -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        try:
            assert await reader.read() == b""
        finally:
            closed.set()

    async with raw(serve) as upstream:
        request = asyncio.create_task(get(upstream))
        await arrived.wait()
        request.cancel()
        async with asyncio.timeout(60):
            await closed.wait()
        assert not upstream.busy


async def test_breaking_off_fails_what_waits_for_its_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw(serve) as upstream:
        request = asyncio.create_task(get(upstream))
        await until(lambda: upstream.busy)
        upstream.break_off("killed")
        with pytest.raises(BrokenError, match="killed"):
            await request


async def test_breaking_off_spares_an_answer_whose_first_bytes_have_arrived() -> None:
    finish = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await finish.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with raw(serve) as upstream:
        answer = await upstream.request(b"GET", b"/")
        upstream.break_off("frozen")
        finish.set()
        assert await whole(answer) == b"ab"


async def test_breaking_off_fails_requests_whose_connection_is_still_being_made() -> None:
    async with raw(saying(OK)) as upstream:
        request = asyncio.create_task(get(upstream))
        await until(lambda: upstream._opening)
        upstream.break_off("killed")
        upstream.break_off("twice")
        with pytest.raises(BrokenError, match="killed"):
            await request
        assert not upstream._opening
        assert await get(upstream) == (200, b"ok")


async def test_a_slow_reader_holds_a_fast_server_back() -> None:
    written = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            written += 1

    async with raw(serve) as upstream:
        answer = await upstream.request(b"GET", b"/")
        await until(lambda: answer.size >= 256 * 1024)
        assert answer.size < 1 << 20
        assert written < 64
        assert len(await whole(answer)) == 64 << 20


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=5000), st.lists(st.integers(1, 400), max_size=20), st.booleans())
def test_bodies_are_what_they_were_however_they_are_cut(body: bytes, cuts: list[int], chunked: bool) -> None:
    if chunked:
        framed = b"transfer-encoding: chunked\r\n\r\n"
        framed += b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        framed += b"0\r\n\r\n"
    else:
        framed = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    message = b"HTTP/1.1 200 OK\r\n" + framed

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        left = message
        for cut in cuts:
            writer.write(left[:cut])
            left = left[cut:]
            await asyncio.sleep(0)
        writer.write(left)

    async def check() -> Any:
        async with raw(serve) as upstream:
            return await get(upstream)

    assert asyncio.run(check()) == (200, body)
