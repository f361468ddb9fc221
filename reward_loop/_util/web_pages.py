"""Protection of servers on this machine against web pages that a browser on this machine shows.

A page may send requests to any address that its browser can reach, loopback included. Two checks recognise them:

- The origin: a browser names the page's server in the ``Origin`` header of each request that can change something.
- The host: a page whose name resolves to this machine (DNS rebinding) has this server's origin, but its own name stands
  in the ``Host`` header. An IP address cannot be rebound.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Collection

__all__ = ["is_foreign_origin", "is_known_host", "own_names"]


def is_foreign_origin(origin: str | None, host: str) -> bool:
    """Return whether a request comes from a page of another server.

    Args:
        origin: the ``Origin`` header; ``None`` if the request has none, as those of programs.
        host: the ``Host`` header.
    """
    if origin is None:
        return False
    scheme, _, netloc = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return port is None or not netloc or netloc.removesuffix(port) != host.lower().removesuffix(port)


def is_known_host(host: str, names: Collection[str], any_address: bool) -> bool:
    """Return whether the ``Host`` header contains one of the names, which are lower case. The port is not checked.

    Args:
        host: the header.
        names: the accepted names and IP addresses.
        any_address: whether all IP addresses are accepted.
    """
    before, _, port = host.rpartition(":")
    name = (before if port.isdecimal() else host).strip("[]").lower()
    name = name.removesuffix(".")  # which ends a name that is complete, as "localhost."
    if name in names or not any_address:
        return name in names
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache
def own_names() -> frozenset[str]:
    """Return the names of this machine, ``localhost`` included. The lookup is done once."""
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), socket.getfqdn()))
