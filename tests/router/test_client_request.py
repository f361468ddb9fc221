from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reward_loop.router.http_server import ClientRequest
from reward_loop.router.messages import Refusal
from tests.router.transport import Transport

EXPECTING = [(b"expect", b"100-Continue")]


def request(
    transport: Transport, method: str = "POST", url: bytes = b"/x", headers: list[Any] | None = None
) -> ClientRequest:
    writable = asyncio.Event()
    writable.set()
    return ClientRequest(transport, writable, method, url, "1.1", headers or [], keep_alive=True)


@pytest.mark.parametrize(
    ("url", "path", "target"),
    [
        (b"/a%20b?q=1", "/a b", b"/a%20b?q=1"),
        (b"/a#b?c", "/a", b"/a"),
        (b"http://h:1/a?q", "/a", b"/a?q"),
        (b"http://h", "/", b"/"),
        (b"//a/../b", "//a/../b", b"//a/../b"),
    ],
)
async def test_paths_are_decoded_and_targets_are_not(url: bytes, path: str, target: bytes) -> None:
    client = request(Transport(), url=url)
    assert (client.path, client.target) == (path, target)


@pytest.mark.parametrize("early", [b"abc", b"ab", b""])
async def test_a_body_that_is_too_long_is_refused_before_its_end(early: bytes) -> None:
    client = request(Transport())
    client.add(early)
    reading = asyncio.create_task(client.read_body(2))
    await asyncio.sleep(0)
    client.add(b"c" * 3)
    with pytest.raises(Refusal, match="longer than 2 bytes") as refused:
        await reading
    assert refused.value.status == 413


async def test_reading_pauses_while_a_long_body_is_not_read() -> None:
    transport = Transport()
    client = request(transport)
    client.add(b"x" * 70_000)
    assert not transport.reading
    reading = asyncio.create_task(client.read_body(100_000))
    await asyncio.sleep(0)
    assert transport.reading
    client.add(b"x")
    client.end_body()
    assert len(await reading) == 70_001


@pytest.mark.parametrize("complete", [True, False])
async def test_a_continue_is_sent_only_if_the_body_is_read_and_incomplete(complete: bool) -> None:
    transport = Transport()
    client = request(transport, headers=EXPECTING)
    if complete:
        client.end_body()
    reading = asyncio.create_task(client.read_body(1))
    await asyncio.sleep(0)
    assert transport.written == (b"" if complete else b"HTTP/1.1 100 Continue\r\n\r\n")
    client.end_body()
    await reading


async def test_an_answer_before_the_continue_closes_the_connection() -> None:
    transport = Transport()
    request(transport, headers=EXPECTING).answer(401, [(b"content-length", b"0")], b"")
    # The client may send its body or not, and its next request would be taken for the body.
    assert transport.written == b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"x", b"1")], b"x: 1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n1\r\n!\r\n0\r\n\r\n"),
        ([(b"content-length", b"3")], b"content-length: 3\r\n\r\nok!"),
    ],
)
async def test_an_answer_in_parts(headers: Any, body: bytes) -> None:
    transport = Transport()
    client = request(transport)
    client.start(200, headers)
    await client.write(b"ok")
    assert client.started
    assert not client.answered
    await client.write(b"!")
    client.end()
    assert client.answered
    assert transport.written == b"HTTP/1.1 200 OK\r\n" + body


async def test_no_error_is_sent_after_the_beginning_of_an_answer() -> None:
    transport = Transport()
    client = request(transport)
    client.refuse(Refusal(503, "first", close=True))
    client.refuse(Refusal(503, "second"))
    assert b"connection: close" in transport.written
    assert b"first" in transport.written
    assert b"second" not in transport.written
