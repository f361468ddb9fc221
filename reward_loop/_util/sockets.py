"""Listening sockets, and what their addresses say."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["is_loopback", "listen", "reserve", "url_of"]


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on ``host``; port 0 lets the kernel choose.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def reserve(host: str) -> socket.socket:
    """A socket that keeps a free port of ``host`` for a program that will bind it by itself.

    It never listens. While it is open, the kernel gives the port to nobody who asks for any; who names it, and has
    ``SO_REUSEADDR`` or ``SO_REUSEPORT`` as servers do, can bind it and listen, again and again.

    Raises:
        OSError: the host cannot be bound.
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


def url_of(listener: socket.socket) -> str:
    """The ``http://host:port`` that a listening socket is reached at."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
