"""Bounds of what requests take from this process: file descriptors, and memory for a reply."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Awaitable, Callable

import aiohttp

__all__ = ["MAX_REPLY_BYTES", "ReplyTooLongError", "max_connections", "read", "with_descriptor"]

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""The longest reply by default, in bytes after decompression."""

_RETRY_S = 0.1


class ReplyTooLongError(Exception):
    """A reply is longer than its bound."""


def max_connections() -> int:
    """Return how many connections an event loop may use at a time; 0 for no bound.

    That is half of the file descriptors that this process can still open (``ulimit -n``). The other half is left to
    other event loops and to the rest of the program.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:
        in_use = 0
    return max(1, (limit - in_use) // 2)


async def with_descriptor(send: Callable[[], Awaitable[aiohttp.ClientResponse]]) -> aiohttp.ClientResponse:
    """Send a request; if the process has no free file descriptor for its connection, wait until it has one.

    There is no event to wait for: any part of the program may close a file.
    """
    while True:
        try:
            return await send()
        except OSError as error:  # before anything was sent
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        await asyncio.sleep(_RETRY_S)


async def read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a reply, decompressed.

    Raises:
        ReplyTooLongError: it has more bytes; the rest is not read.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            response.close()
            raise ReplyTooLongError
        chunks.append(chunk)
    return b"".join(chunks)
