"""Listening sockets, and what their addresses say."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["is_loopback", "listen", "url_of"]


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on ``host``; port 0 lets the kernel choose.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def url_of(listener: socket.socket) -> str:
    """The ``http://host:port`` that a listening socket is reached at."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
