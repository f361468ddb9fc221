"""The framing of all messages between processes: a frame is the length of its content (8 bytes), then the content.

The module imports only small modules of the standard library, so that worker processes start with few modules.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

__all__ = ["FrameBuffer", "frame", "read_frame", "receive_frame"]

_LENGTH = struct.Struct("!Q")


class _Stream(Protocol):
    """An `asyncio.StreamReader`; this module does not import asyncio."""

    async def readexactly(self, n: int) -> bytes: ...


class FrameBuffer:
    """Collects the received bytes of a connection, and returns the complete frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._received += data

    def pop(self) -> bytes | None:
        """Remove the first frame and return its content, or ``None`` if the frame is incomplete."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        # A copy: a bytearray cannot shrink while a view of it exists.
        content = bytes(memoryview(self._received)[_LENGTH.size : end])
        del self._received[:end]
        return content


def frame(*parts: bytes) -> bytes:
    """Return the frame whose content is the parts, joined."""
    return b"".join((_LENGTH.pack(sum(map(len, parts))), *parts))


def receive_frame(connection: socket.socket, max_length: int | None = None) -> bytes:
    """Wait for a frame on a blocking socket, and return its content.

    Raises:
        EOFError: the connection has ended.
        OSError: the connection failed, or its timeout has passed.
        ValueError: the content is longer than ``max_length``.
    """
    length = _checked(_receive_exactly(connection, _LENGTH.size), max_length)
    return bytes(_receive_exactly(connection, length))


async def read_frame(reader: _Stream, max_length: int | None = None) -> bytes:
    """Wait for a frame on an asyncio stream, and return its content. Raises the same errors as `receive_frame`."""
    length = _checked(await reader.readexactly(_LENGTH.size), max_length)
    return await reader.readexactly(length)


def _checked(header: bytes | bytearray, max_length: int | None) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if max_length is not None and length > max_length:
        raise ValueError(f"a message has {length} bytes, more than the maximum of {max_length}")
    return length


def _receive_exactly(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection has ended")
        view = view[count:]
    return content
