"""Limits on the resources of requests: file descriptors, and memory for a reply."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Awaitable, Callable

import aiohttp

__all__ = ["MAX_REPLY_BYTES", "ReplyTooLongError", "max_connections", "read", "with_descriptor"]

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""The default limit on the length of a reply, in bytes after decompression."""

_RETRY_S = 0.1


class ReplyTooLongError(Exception):
    """A reply is longer than the limit."""

    def __init__(self, status: int) -> None:
        self.status = status
        """The status of the reply."""


def max_connections() -> int:
    """Returns the maximum number of concurrent connections of an event loop; 0 for no limit.

    This is half of the file descriptors that this process can still open (``ulimit -n``). The other half is for other
    event loops and the rest of the program.
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
    """Sends a request; while the process has no free file descriptor for the connection, retries every `_RETRY_S` s.

    It polls, because any part of the program may free a descriptor.
    """
    while True:
        try:
            return await send()
        except OSError as error:  # Nothing has been sent yet.
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        await asyncio.sleep(_RETRY_S)


async def read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Returns the decompressed body of a reply.

    Raises:
        ReplyTooLongError: the body is longer than `max_bytes`; the connection is closed.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            response.close()
            raise ReplyTooLongError(response.status)
        chunks.append(chunk)
    return b"".join(chunks)
