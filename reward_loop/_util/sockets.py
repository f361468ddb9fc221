"""Listening sockets and their addresses."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket

__all__ = ["is_loopback", "is_taken", "listen", "readable", "reserve", "url_of"]

_LOOPBACK_S = 0.5
"""The timeout of a connection to this machine, in seconds."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening TCP socket on ``host``; with port 0, the kernel chooses a free port.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Thousands of samples may connect at once. Beyond the backlog, the kernel drops connections, and clients try again
    # after seconds.
    return socket.create_server((host, port), family=family, backlog=4096)


async def readable(connection: socket.socket) -> None:
    """Wait until data has arrived, or the connection has ended, without reading from it."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)


def reserve(host: str) -> socket.socket:
    """Return a socket that reserves a free port of ``host`` for a program that binds the port itself.

    While the socket, which never listens, is open, the kernel does not assign its port to programs that ask for any
    free port. A program that binds it by number, with ``SO_REUSEADDR`` or ``SO_REUSEPORT`` as servers do, can listen.

    Raises:
        OSError: no port of the host can be bound.
    """
    reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind((host, 0))
    except OSError:
        reservation.close()
        raise
    return reservation


def is_taken(reservation: socket.socket) -> bool:
    """Return whether another program listens on the address of a reservation, see `reserve`."""
    address = reservation.getsockname()
    # First a connection: a bind with SO_REUSEPORT succeeds beside another listener of this user that sets it, too.
    with socket.socket(reservation.family) as connection, contextlib.suppress(OSError):
        connection.settimeout(_LOOPBACK_S)
        connection.connect(address)
        return True
    with socket.socket(reservation.family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError:
            return True
    return False


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket, ``http://host:port``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Return whether the socket can be reached from this machine only."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
