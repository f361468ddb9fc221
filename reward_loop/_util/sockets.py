"""Waiting for data on a socket."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["readable"]


async def readable(connection: socket.socket) -> None:
    """Wait until data has arrived, or the connection has ended, without reading from it."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)
