"""Which HTTP headers a proxy passes on (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache

__all__ = ["HOP_BY_HOP", "RawHeader", "end_to_end", "find", "is_looping", "named_by_connection", "to_wire"]

RawHeader = tuple[bytes, bytes]
"""A header's name, in lower case, and its value."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers about one connection only."""

_TRIVIAL_OPTIONS = frozenset({b"", b"close", b"keep-alive"})

# They say how long the body is and where the request goes; a sender cannot have them taken away (RFC 9110, 7.6.1).
_NEVER_NAMED = frozenset({b"content-length", b"host"})


def end_to_end(headers: list[RawHeader], hop_by_hop: Sequence[RawHeader]) -> list[RawHeader]:
    """``headers`` without those that a ``Connection`` among the hop-by-hop ones names."""
    named = named_by_connection(hop_by_hop)
    return [header for header in headers if header[0] not in named] if named else headers


def named_by_connection(headers: Sequence[RawHeader]) -> frozenset[bytes]:
    """The names of headers that ``Connection`` says are about this connection only."""
    # Nearly always there is one, and it is one of two.
    return _options(b",".join([value for name, value in headers if name == b"connection"]))


@lru_cache(maxsize=64)
def _options(connection: bytes) -> frozenset[bytes]:
    named = {option.strip() for option in connection.lower().split(b",")}
    return frozenset(named - _TRIVIAL_OPTIONS - _NEVER_NAMED)


def to_wire(headers: Sequence[RawHeader], without: Container[bytes] = ()) -> bytes:
    """Header lines as they are written, each with its line end."""
    lines = [b": ".join(header) for header in headers if header[0] not in without]
    lines.append(b"")
    return b"\r\n".join(lines)


def is_looping(headers: Sequence[RawHeader], identity: bytes) -> bool:
    """Whether a ``Via`` header says that a request has passed the router with this identity."""
    return any(name == b"via" and identity in value for name, value in headers)


def find(headers: Sequence[RawHeader], name: bytes) -> bytes | None:
    """The value of the first header called ``name``."""
    for candidate, value in headers:
        if candidate == name:
            return value
    return None
