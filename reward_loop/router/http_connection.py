"""One connection to a server: HTTP/1.1, parsed by httptools, with at most one request in flight.

========== ========= ========== ==================================================================
State      `_answer` `_arrival` Meaning
========== ========= ========== ==================================================================
idle       None      None       no request; in `Upstream._idle`, unless it is new
unanswered set       set        :meth:`Connection.request` waits; in `Upstream.busy`
streaming  set       None       the head was delivered, the body is being read; in `Upstream.busy`
closed     None      None       never used again
========== ========= ========== ==================================================================

- An answer without a body, or with a ``Content-Length`` of at most `_WHOLE_UP_TO` bytes, is delivered complete; other
  answers are delivered when their head is complete.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

from reward_loop.errors import ServerError
from reward_loop.router.headers import HOP_BY_HOP, RawHeader, end_to_end, find

if TYPE_CHECKING:
    from reward_loop.router.http_client import Upstream

__all__ = ["NO_BODY", "Answer", "BrokenError", "ConnectError", "Connection", "StaleError", "UpstreamError"]

_WHOLE_UP_TO = 1 << 20
"""Answers with a known length up to this (in bytes) are delivered complete, so they can be retried if they break."""

_BUFFER = 256 * 1024
"""Reading from the server pauses while this many bytes of an answer are buffered."""

_HEAD_UP_TO = 64 * 1024
"""The most bytes received without any byte of the body: longer heads, trailers and chunk extensions are errors."""

NO_BODY = frozenset({204, 304})
"""HTTP statuses whose answers have no body, whatever their headers say."""


class UpstreamError(ServerError):
    """A server sent no complete answer."""


class ConnectError(UpstreamError):
    """The connection to the server failed, so the request was not sent."""


class BrokenError(UpstreamError):
    """The connection broke, or the answer is not valid HTTP."""


class StaleError(BrokenError):
    """A reused connection broke before the first byte of the answer.

    Either the server closed the connection while it was idle, or the server died. A dead server's socket may still
    accept connections, because the process that restarts the server keeps the socket open.
    """


class Answer:
    """A server's answer: its head, and the part of the body received so far."""

    __slots__ = ("_connection", "_error", "_parts", "_waiter", "complete", "headers", "length", "size", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: list[RawHeader] = []
        """The end-to-end headers."""
        self.length: int | None = None
        """The value of ``Content-Length``."""
        self.complete = False
        """Whether the whole body has been received."""
        self.size = 0
        """The number of buffered bytes of the body."""
        self._parts: list[bytes] = []
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None

    def take(self) -> bytes:
        """Returns and removes the buffered part of the body; does not wait."""
        parts, self._parts = self._parts, []
        if self.size >= _BUFFER:
            self._connection.resume()
        self.size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """Waits for the next part of the body, and returns it; empty at the end of the body.

        Raises:
            BrokenError: the connection broke before the end.
        """
        while not self._parts and not self.complete:
            if self._error:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take()

    def close(self) -> None:
        """Discards the rest of the answer: closes the connection unless the answer is complete."""
        if not self.complete:
            self._connection.close()

    def add(self, part: bytes) -> None:
        """Appends a received part of the body; pauses reading if the buffer is full."""
        self._parts.append(part)
        self.size += len(part)
        # An answer that is delivered complete has no reader yet, so it must not pause.
        if self.size >= _BUFFER and not self._connection.unanswered:
            self._connection.pause()
        self.wake()

    def wake(self, error: UpstreamError | None = None) -> None:
        """Wakes `read`; with an error, `read` raises it after the buffered parts."""
        self._error = self._error or error
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One connection to a server, with at most one request in flight."""

    __slots__ = (
        "_answer",
        "_arrival",
        "_bodiless",
        "_ended",
        "_head_only",
        "_headers",
        "_hop_by_hop",
        "_in_body",
        "_keep",
        "_parser",
        "_paused",
        "_to_its_end",
        "_transport",
        "_upstream",
        "closed",
        "heard",
        "idle_since",
        "used",
    )

    def __init__(self, upstream: Upstream) -> None:
        self.closed = False
        self.used = False
        """Whether an earlier answer was received over this connection."""
        self.heard = False
        """Whether any bytes were received since the request was sent."""
        self.idle_since = 0.0
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._arrival: asyncio.Future[Answer] | None = None
        self._headers: list[RawHeader] = []
        self._hop_by_hop: list[RawHeader] = []
        self._head_only = False
        self._in_body = False
        self._bodiless = 0
        self._ended = False
        self._keep = False
        self._to_its_end = False
        self._paused = False

    @property
    def unanswered(self) -> bool:
        """Whether a request is in flight whose answer has not been delivered."""
        return self._answer is not None and self._arrival is not None

    async def request(self, message: bytes, head_only: bool) -> Answer:
        """Sends a request and waits for its answer; see :meth:`~.http_client.Upstream.request`.

        Args:
            message: the whole request.
            head_only: whether its answer has no body, because it is a HEAD request.
        """
        self._upstream.busy.add(self)
        self._arrival = arrival = self._upstream.loop.create_future()
        self._answer = answer = Answer(self)
        self._headers = []
        self._hop_by_hop = []
        self._head_only = head_only
        self._in_body = self._ended = self._keep = False
        self._bodiless = 0
        self.heard = False
        self._transport.write(message)
        try:
            return await arrival
        except asyncio.CancelledError:
            # If the answer is complete, the connection may already have another request.
            answer.close()
            raise

    def close(self) -> None:
        """Closes the connection at once, and discards unsent data; the answer is not delivered any more."""
        self.closed = True
        self._answer = self._arrival = None
        self._upstream.busy.discard(self)
        self._transport.abort()

    def fail(self, reason: str, *, certain: bool = False) -> None:
        """Ends the request in flight, if any, with an error.

        Args:
            reason: the error's message.
            certain: whether the server is known to have failed; otherwise the error may be a :class:`StaleError`.
        """
        answer, arrival = self._answer, self._arrival
        self.close()
        if answer is None:
            return
        stale = self.used and not self.heard and not certain
        error = (StaleError if stale else BrokenError)(reason)
        if arrival is None:
            answer.wake(error)
        elif not arrival.done():
            arrival.set_exception(error)

    def pause(self) -> None:
        """Stops reading from the server, if the connection is open."""
        if not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continues to read from the server, if the connection is open."""
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._upstream.reads += 1
        if self._answer is None:
            self.close()
            return
        wrong = None
        self._bodiless += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            wrong = "the server switched to another protocol"
        except httptools.HttpParserError as error:
            wrong = f"the answer is not valid HTTP: {error.__context__ or error}"
        # Finish only after all bytes are parsed: another request may reuse the connection, and the remaining bytes are
        # not its answer.
        if self._ended:
            self._finish(keep=self._keep and not wrong)
        elif wrong:
            self.fail(wrong)
        elif self._bodiless > _HEAD_UP_TO:
            self.fail(f"the head of the answer is longer than {_HEAD_UP_TO} bytes")

    def eof_received(self) -> bool:
        if self._answer and self._to_its_end and self._in_body:
            self._finish(keep=False)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(str(error or "") or "the connection was closed before the end of the answer")

    # The parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # Ignore trailers.
            name = name.lower()
            (self._hop_by_hop if name in HOP_BY_HOP else self._headers).append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._ended:
            raise ValueError("an answer without a request")
        if not 100 <= status <= 599 or status == 101:
            raise ValueError(f"status {status}")
        if status < 200:
            self._headers = []
            self._hop_by_hop = []
            return
        answer = self._answer
        assert answer is not None
        self._in_body = True
        answer.status = status
        headers = self._headers
        chunked = False
        if self._hop_by_hop:
            chunked = find(self._hop_by_hop, b"transfer-encoding") is not None
            headers = end_to_end(headers, self._hop_by_hop)
        answer.headers = headers
        if (length := find(headers, b"content-length")) is not None:
            answer.length = int(length)
        if self._head_only:
            # The parser does not know that this answers a HEAD request, and would wait for a body.
            self._ended = True
            self._keep = self._parser.should_keep_alive()
            return
        self._to_its_end = answer.length is None and not chunked and status not in NO_BODY
        if (answer.length is None or answer.length > _WHOLE_UP_TO) and status not in NO_BODY:
            arrival, self._arrival = self._arrival, None
            if arrival and not arrival.done():
                arrival.set_result(answer)
        return

    def on_body(self, body: bytes) -> None:
        self._bodiless = 0
        if self._head_only:
            self._keep = False
        elif self._answer:
            self._answer.add(body)

    def on_message_complete(self) -> None:
        if self._in_body and not self._head_only:
            self._ended = True
            self._keep = self._parser.should_keep_alive()

    def _finish(self, *, keep: bool) -> None:
        answer, arrival = self._answer, self._arrival
        self._answer = self._arrival = None
        assert answer is not None
        answer.complete = True
        self.used = True
        if self._head_only:
            self._parser = httptools.HttpResponseParser(self)
        # If the server answered before it read the whole request, the connection cannot be reused.
        if keep and not self._transport.get_write_buffer_size():
            self.resume()
            self._upstream.release(self)
        else:
            self.close()
        if arrival is None:
            answer.wake()
        elif not arrival.done():
            arrival.set_result(answer)
