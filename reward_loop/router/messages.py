"""What requests and answers consist of: headers, errors of the router itself, and the log of these errors."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import orjson

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


# eq=False: an exception is equal only to itself.
@dataclass(eq=False)
class Refusal(Exception):
    """The router refuses a request with an HTTP error, in the JSON format of vLLM's errors."""

    status: int
    """The HTTP status."""
    message: str
    """The reason, and what the client can use instead."""
    _: KW_ONLY
    param: str | None = None
    """The name of the invalid field."""
    retry_after_s: float | None = None
    """Seconds for the ``Retry-After`` header, rounded up, at least 1."""
    allow: str | None = None
    """The value of the ``Allow`` header, for a 405."""
    code: str | None = None
    """What programs read; by default the status."""
    close: bool = False
    """Whether to close the connection after the answer."""

    def __str__(self) -> str:
        return self.message

    def render(self) -> tuple[list[RawHeader], bytes]:
        """Return the headers and the body of the HTTP answer."""
        error = {"message": self.message, "type": "RouterError", "param": self.param, "code": self.code or self.status}
        body = orjson.dumps({"error": error})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers, body


def body_too_long(limit: int) -> Refusal:
    """Return the error for a body of more than `limit` bytes."""
    return Refusal(413, f"the body is longer than {limit} bytes", close=True)


INTERVAL_S = 10.0


class LimitedLog:
    """Logs at most one message of a kind every `interval_s` seconds, with the number of suppressed ones."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self.refused: Counter[int] = Counter()
        """Refused requests by status."""
        self._logger = logger
        self._interval_s = interval_s
        self._silent_until: dict[Hashable, float] = {}
        self._suppressed: Counter[Hashable] = Counter()
        """The number of suppressed messages of each kind since its last line."""

    def refused_request(self, method: str, path: str, refusal: Refusal) -> None:
        """Count a refused request, and log it; each HTTP status is a kind of message."""
        self.refused[refusal.status] += 1
        # A path is percent-decoded, so it may contain line breaks.
        printable = path[:200].encode("unicode_escape").decode()
        self.warning(refusal.status, "%s %s: %d, %s", method, printable, refusal.status, refusal.message)

    def warning(self, kind: Hashable, message: str, *args: object) -> None:
        """Log a message, or only count it if a line of this kind was logged within the interval."""
        now = time.monotonic()
        if now < self._silent_until.get(kind, 0.0):
            self._suppressed[kind] += 1
            return
        self._silent_until[kind] = now + self._interval_s
        suppressed = self._suppressed.pop(kind, 0)
        more = f" (and {suppressed} more like this since the last such line)" if suppressed else ""
        self._logger.warning(message + "%s", *args, more)
