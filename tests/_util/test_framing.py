from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop._util.framing import FrameBuffer, frame, read_frame, receive_frame

CONTENTS = st.lists(st.binary(max_size=50), max_size=8)


@given(CONTENTS, st.integers(1, 100))
def test_frames_are_complete_however_the_bytes_arrive(contents: list[bytes], chunk: int) -> None:
    sent = b"".join(frame(content[:3], content[3:]) for content in contents)
    buffer, received = FrameBuffer(), []
    for start in range(0, len(sent), chunk):
        buffer.feed(sent[start : start + chunk])
        while (content := buffer.pop()) is not None:
            received.append(content)
    assert received == contents
    assert buffer.pop() is None


def test_a_blocking_socket_receives_frames_until_the_end_of_the_connection() -> None:
    sender, receiver = socket.socketpair()
    contents = [b"first", b"", bytes(1 << 20)]

    def send() -> None:
        with sender:
            sender.sendall(b"".join(map(frame, contents)) + frame(b"cut")[:-1])

    thread = threading.Thread(target=send)
    thread.start()
    with receiver:
        assert [receive_frame(receiver) for _ in contents] == contents
        with pytest.raises(EOFError):
            receive_frame(receiver)
    thread.join()


async def test_an_asyncio_stream_receives_frames_until_the_end_of_the_connection() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(frame(b"first") + frame(b"") + frame(b"cut")[:-1])
    reader.feed_eof()
    assert [await read_frame(reader), await read_frame(reader)] == [b"first", b""]
    with pytest.raises(EOFError):
        await read_frame(reader)


async def test_a_frame_above_the_maximum_length_is_an_error_before_its_content_arrives() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ValueError, match="more than the maximum of 100"):
        await read_frame(reader, 100)
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(frame(bytes(101))[:8])
        with pytest.raises(ValueError, match="101 bytes, more than the maximum of 100"):
            receive_frame(receiver, 100)
