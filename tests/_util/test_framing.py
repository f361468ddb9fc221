from __future__ import annotations

import asyncio

import pytest

from reward_loop._util.framing import frame, read_frame


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
