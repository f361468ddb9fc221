"""HTTP headers: which ones a proxy forwards (RFC 9110, 7.6.1), and how they are written."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache

RawHeader = tuple[bytes, bytes]
"""The name of a header, in lower case, and its value."""

BACKEND = b"x-reward-loop-backend"
"""The header of an answer that names the server which answered."""

GROUP = b"x-reward-loop-group"
"""The header of a request whose value is the same for all requests with the same beginning of their prompts."""

NO_WAIT = b"x-reward-loop-no-wait"
"""The header of a request that is refused while no server is up, because the client waits itself."""

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
"""Headers that apply to a single connection, and are not forwarded."""

# "close" and "keep-alive" are not header names. The proxy needs the body's length and the request's host: a
# `Connection` header cannot remove them (RFC 9110, 7.6.1).
_NEVER_NAMED = frozenset({b"", b"close", b"keep-alive", b"content-length", b"host"})


def end_to_end(headers: list[RawHeader], hop_by_hop: Sequence[RawHeader]) -> list[RawHeader]:
    """Return `headers` without those listed in a ``Connection`` header among `hop_by_hop`."""
    named = named_by_connection(hop_by_hop)
    return [header for header in headers if header[0] not in named] if named else headers


def named_by_connection(headers: Sequence[RawHeader]) -> frozenset[bytes]:
    """Return the names of the hop-by-hop headers that the ``Connection`` headers list."""
    # The result is cached: nearly all requests have "close" or "keep-alive".
    return _options(b",".join([value for name, value in headers if name == b"connection"]))


@lru_cache(maxsize=64)
def _options(connection: bytes) -> frozenset[bytes]:
    named = {option.strip() for option in connection.lower().split(b",")}
    return frozenset(named - _NEVER_NAMED)


def to_wire(headers: Sequence[RawHeader], without: Container[bytes] = ()) -> bytes:
    """Return the header lines in wire format, each with CRLF, except for the names in `without`."""
    kept = [header for header in headers if header[0] not in without] if without else headers
    return b"\r\n".join([*map(b": ".join, kept), b""])


def find(headers: Sequence[RawHeader], name: bytes) -> bytes | None:
    """Return the value of the first header with this name (in lower case), or ``None``."""
    for candidate, value in headers:
        if candidate == name:
            return value
    return None
