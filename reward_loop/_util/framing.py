"""The framing of messages of the limiter service: a frame is the length of its content (8 bytes), then the content."""

from __future__ import annotations

import asyncio
import struct

__all__ = ["frame", "read_frame"]

_LENGTH = struct.Struct("!Q")


def frame(*parts: bytes) -> bytes:
    """Return the frame whose content is the parts, joined."""
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


async def read_frame(reader: asyncio.StreamReader, max_length: int | None = None) -> bytes:
    """Wait for a frame on an asyncio stream, and return its content.

    Raises:
        EOFError: the connection has ended.
        OSError: the connection failed.
        ValueError: the content is longer than ``max_length``.
    """
    length: int = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    if max_length is not None and length > max_length:
        raise ValueError(f"a message has {length} bytes, more than the maximum of {max_length}")
    return await reader.readexactly(length)
