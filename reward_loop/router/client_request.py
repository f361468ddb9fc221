"""One request of a client, and its answer."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import unquote

import httptools

from reward_loop.router.error_answers import Refusal, body_too_long
from reward_loop.router.headers import RawHeader, find, to_wire

_UNREAD_UP_TO = 64 * 1024
"""Reading from the client pauses while more bytes of a body than this wait to be read."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Flow:
    """The transport of a client's connection, with the state of its flow control."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.writable = asyncio.Event()
        """Set while the write buffer has room. It fills if the client does not read its answers."""
        self.writable.set()
        self.reading_paused = False

    def pause_reading(self) -> None:
        """Stop reading from the client."""
        if not self.reading_paused:
            self.reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue to read from the client."""
        if self.reading_paused:
            self.reading_paused = False
            self.transport.resume_reading()


class WaitsFor(StrEnum):
    """What a request waits for, if not for the answer of a server."""

    TURN = "its turn"
    BODY = "its body"
    SERVER = "a server"


class ClientRequest:
    """One request of a client, and its answer.

    The answer is sent with :meth:`answer`, or in parts with :meth:`start`, :meth:`write` and :meth:`end`.

    Args:
        flow: the connection.
        method: the HTTP method.
        url: the URL of the request line; the parser's `HttpParserInvalidURLError` is raised if it is invalid.
        version: the HTTP version, such as ``1.1``.
        headers: names in lower case, and values.
        keep_alive: whether the connection stays open after the answer.
    """

    def __init__(
        self, flow: Flow, method: str, url: bytes, version: str, headers: list[RawHeader], *, keep_alive: bool
    ) -> None:
        self.method = method
        self.path, self.target = _parse_target(url)
        self.version = version
        self.headers = headers
        self.keep_alive = keep_alive
        self.body_complete = False
        """Whether the whole body has been received."""
        self.started = False
        """Whether the answer has begun."""
        self.answered = False
        """Whether the answer is complete."""
        self.waits_for: str = WaitsFor.TURN
        """A `WaitsFor`, or the URL of the server whose answer the request waits for."""
        self.task: asyncio.Task[None]
        """The task that serves the request."""
        self._flow = flow
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._received: asyncio.Future[None] | None = None
        self._chunked = False

    @property
    def address(self) -> str | None:
        """The IP address of the client; ``None`` if its connection is a Unix socket."""
        peer = self._flow.transport.get_extra_info("peername")
        return str(peer[0]) if peer else None

    @property
    def name(self) -> str:
        """The method and the path, for messages."""
        return f"{self.method} {self.path}"

    # The body

    def add(self, part: bytes) -> None:
        """Append a received part of the body."""
        # The rest of a refused body is received and dropped: a close before its end could reset the connection.
        if self.answered:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._received is None:
            if self._size > _UNREAD_UP_TO:
                self._flow.pause_reading()
        elif self._size > self._limit and not self._received.done():
            self._received.set_exception(body_too_long(self._limit))

    def end_body(self) -> None:
        """Record that the body is complete."""
        self.body_complete = True
        if self._received and not self._received.done():
            self._received.set_result(None)

    def received_body(self, limit: int) -> bytes | None:
        """Return the whole body if it has been received.

        Raises:
            Refusal: the body is longer than `limit` bytes.
        """
        if self._size > limit:
            raise body_too_long(limit)
        if not self.body_complete:
            return None
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read_body(self, limit: int) -> bytes:
        """Wait for the whole body, and return it.

        Raises:
            Refusal: the body is longer than `limit` bytes.
        """
        if (body := self.received_body(limit)) is not None:
            return body
        if self._expects_continue():
            self._flow.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._limit = limit
        self.waits_for = WaitsFor.BODY
        self._received = asyncio.get_running_loop().create_future()
        self._flow.resume_reading()
        await self._received
        return b"".join(self._parts)

    def _expects_continue(self) -> bool:
        """Return whether the client sends the body only after a ``100 Continue``."""
        return (find(self.headers, b"expect") or b"").lower() == b"100-continue"

    # The answer

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Send a complete answer; `headers` include ``Content-Length``. For HEAD requests, the body is left out."""
        self.answered = True
        self._flow.transport.write(self._message(status, headers, b"", b"" if self.method == "HEAD" else body))

    def answer_ok(self, body: bytes, content_type: bytes = b"application/json") -> None:
        """Send a complete answer with status 200."""
        self.answer(200, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))], body)

    def refuse(self, refusal: Refusal) -> None:
        """Send an error answer, unless the answer has begun."""
        if not self.started:
            if refusal.close:
                self.keep_alive = False
            self.answer(refusal.status, *refusal.render())

    def start(self, status: int, headers: list[RawHeader]) -> None:
        """Send the head of an answer; without a ``Content-Length``, its body is sent in chunks."""
        self._chunked = find(headers, b"content-length") is None
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._flow.transport.write(self._message(status, headers, framing, b""))

    async def write(self, part: bytes) -> None:
        """Send a part of the body, which is not empty; wait while the client does not read."""
        self._flow.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        await self._flow.writable.wait()

    def end(self) -> None:
        """End the body."""
        self.answered = True
        if self._chunked:
            self._flow.transport.write(b"0\r\n\r\n")

    def _message(self, status: int, headers: list[RawHeader], framing: bytes, body: bytes) -> bytes:
        self.started = True
        # Without a "100 Continue", the client may send its body or not, so the connection cannot be reused.
        if not self.body_complete and self._expects_continue():
            self.keep_alive = False
        # The space before an empty reason is required (RFC 9112, 4).
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        return b"".join((line, to_wire(headers), framing, end, body))


# Cached: nearly all requests have one of a few targets.
@lru_cache(maxsize=64)
def _parse_target(url: bytes) -> tuple[str, bytes]:
    """Return the percent-decoded path, and the path with the query as in the request line."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"#")[0].partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query
    path = raw_path.decode("ascii")
    target = b"%b?%b" % (raw_path, query) if query else raw_path
    return unquote(path) if "%" in path else path, target
