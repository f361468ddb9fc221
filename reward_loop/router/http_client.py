"""A small HTTP/1.1 client for one server: an unbounded pool of connections, parsed by httptools.

A connection has at most one request in flight. Its state:

============ ========= ========== ==================================================================
State        `_answer` `_arrival` Meaning
============ ========= ========== ==================================================================
idle         None      None       no request; in `Upstream._idle`, unless it is new
unanswered   set       set        the `Arrival` has not been called yet; in `Upstream.busy`
streaming    set       None       the head was delivered, the body is being read; in `Upstream.busy`
closed       None      None       never used again
============ ========= ========== ==================================================================

Invariants:

- An `Arrival` is called at most once, and never after its request has been closed.
- An answer without a body, or with a ``Content-Length`` of at most `_WHOLE_UP_TO` bytes, is delivered complete; other
  answers are delivered when their head is complete.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from reward_loop.errors import ServerError
from reward_loop.router.headers import HOP_BY_HOP, RawHeader, end_to_end, find, to_wire

__all__ = [
    "NO_BODY",
    "Answer",
    "Arrival",
    "BrokenError",
    "ConnectError",
    "Sending",
    "StaleError",
    "Upstream",
    "UpstreamError",
]

_WHOLE_UP_TO = 1 << 20
"""Answers with a known length up to this (in bytes) are delivered complete, so they can be retried if they break."""

_BUFFER = 256 * 1024
"""Reading from the server pauses while this many bytes of an answer are buffered."""

_HEAD_UP_TO = 64 * 1024
"""The most bytes received without any byte of the body: longer heads, trailers and chunk extensions are errors."""

_IDLE_S = 4.0
"""Idle connections are closed after this time, in seconds; servers that run in uvicorn close theirs after 5 s."""

_FULL_S = 0.05
"""The pause before a new attempt to connect when the process has no free file descriptor, in seconds."""

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


class Arrival(Protocol):
    """Receives the answer to a request, or its error. An `asyncio.Future` implements it."""

    def done(self) -> bool:
        """Returns whether to discard the answer, because it is already set or cancelled."""

    def set_result(self, answer: Answer, /) -> None:
        """Receives the answer: complete if its length is known and at most `_WHOLE_UP_TO` bytes, else its head."""

    def set_exception(self, error: UpstreamError, /) -> None:
        """Receives the error of a request without an answer."""


class Sending(Protocol):
    """A request in flight, which can be cancelled."""

    def close(self) -> None:
        """Cancels the request; its `Arrival` is not called any more."""


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
        self._arrival: Arrival | None = None
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
        """Whether a request is in flight whose `Arrival` has not been called."""
        return self._answer is not None and self._arrival is not None

    def send(self, message: bytes, head_only: bool, arrival: Arrival) -> None:
        """Sends a request; `arrival` receives its answer or its error."""
        self._upstream.busy.add(self)
        self._arrival = arrival
        self._answer = Answer(self)
        self._headers = []
        self._hop_by_hop = []
        self._head_only = head_only
        self._in_body = self._ended = self._keep = False
        self._bodiless = 0
        self.heard = False
        self._transport.write(message)

    def close(self) -> None:
        """Closes the connection at once, and discards unsent data; the `Arrival` is not called any more."""
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
            wrong = "it switched to another protocol"
        except httptools.HttpParserError as error:
            wrong = f"its answer is not HTTP: {error.__context__ or error}"
        # Finish only after all bytes are parsed: the arrival may send the next request over this connection, and the
        # remaining bytes are not the answer to that request.
        if self._ended:
            self._finish(keep=self._keep and not wrong)
        elif wrong:
            self.fail(wrong)
        elif self._bodiless > _HEAD_UP_TO:
            self.fail(f"the head of its answer is longer than {_HEAD_UP_TO} bytes")

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
            raise ValueError("an answer to nothing")
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


class _Opening:
    """A request whose connection is being opened."""

    __slots__ = ("_arrival", "_connection", "_task", "_upstream")

    def __init__(self, upstream: Upstream, message: bytes, head_only: bool, arrival: Arrival) -> None:
        self._upstream = upstream
        self._arrival = arrival
        self._connection: Connection | None = None
        upstream.opening.add(self)
        self._task = upstream.loop.create_task(self._send(message, head_only))
        # A task that is cancelled before its first step does not run its `finally`.
        self._task.add_done_callback(lambda _: upstream.opening.discard(self))

    def close(self) -> None:
        """Cancels the request; its `Arrival` is not called any more."""
        self._task.cancel()
        if self._connection:
            self._connection.close()

    def fail(self, reason: str) -> None:
        """Ends the request with an error. Call it only while the connection is being opened."""
        self.close()
        self._upstream.opening.discard(self)
        if not self._arrival.done():
            self._arrival.set_exception(BrokenError(reason))

    async def _send(self, message: bytes, head_only: bool) -> None:
        try:
            self._connection = await self._upstream.connect()
        except ConnectError as error:
            if not self._arrival.done():
                self._arrival.set_exception(error)
        else:
            self._connection.send(message, head_only, self._arrival)
        finally:
            self._upstream.opening.discard(self)


class Upstream:
    """An HTTP client for one server, with a pool of connections.

    Each request in flight has its own connection. The most recently used idle connection is reused first; idle
    connections are closed after some seconds.

    Create it in a running event loop, and call :meth:`close` at the end.

        upstream = Upstream("http://127.0.0.1:8000")
        answer = await upstream.request(b"GET", b"/health")
        body = b""
        while part := await answer.read():
            body += part

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        api_key: sent as a bearer token with every request.
        via: the name of this router, sent in a ``Via`` header with every request.
        connect_timeout_s: the timeout for opening a connection, in seconds.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, via: bytes = b"", connect_timeout_s: float = 10.0
    ) -> None:
        parts = urlsplit(url)
        self.loop = asyncio.get_running_loop()
        self.busy: set[Connection] = set()
        """The connections with a request in flight."""
        self.opening: set[_Opening] = set()
        """The requests whose connection is being opened."""
        self.reads = 0
        """How many times bytes were received from the server."""
        self._host = parts.hostname or ""
        # Created once, because it takes about 0.1 s; asyncio would create one for each connection.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._connect_timeout_s = connect_timeout_s
        own = [(b"host", parts.netloc.rpartition("@")[2].encode())]
        if api_key:
            own.append((b"authorization", b"Bearer " + api_key.encode()))
        self._own_headers = b" HTTP/1.1\r\n" + to_wire(own)
        # Written after the client's headers: `Via` entries are in the order of the proxies (RFC 9110, 7.6.3).
        self._head_end = b"via: 1.1 %b\r\n\r\n" % via if via else b"\r\n"
        self._idle: list[Connection] = []
        self._trimming: asyncio.TimerHandle | None = None

    async def request(self, method: bytes, target: bytes, headers: bytes = b"", body: bytes = b"") -> Answer:
        """Sends a request and waits for its answer.

        Cancelling it closes the connection.

        Args:
            method: the HTTP method.
            target: the path and the query, as in the request line.
            headers: header lines (see :func:`~reward_loop.router.headers.to_wire`), with ``Content-Length`` if there is
                a body, and without ``Host``.
            body: the whole body.

        Returns:
            the answer: complete if its length is known and at most `_WHOLE_UP_TO` bytes, else with its head.

        Raises:
            ConnectError: the connection could not be opened.
            StaleError: a reused connection broke before the first byte of the answer.
            BrokenError: the connection broke, or the answer is not valid HTTP.
        """
        arrival: asyncio.Future[Answer] = self.loop.create_future()
        sending = self.send(arrival, method, target, headers, body)
        try:
            return await arrival
        except asyncio.CancelledError:
            sending.close()
            raise

    def send(self, arrival: Arrival, method: bytes, target: bytes, headers: bytes = b"", body: bytes = b"") -> Sending:
        """Sends a request, without waiting if a connection is idle; `arrival` receives its answer or its error.

        After a :class:`StaleError`, the request can be retried: the server has not begun to answer.

        Args:
            arrival: receives the answer or the error.
            method, target, headers, body: as in :meth:`request`.

        Returns:
            the request in flight; closing it cancels the request.
        """
        message = b"".join((method, b" ", target, self._own_headers, headers, self._head_end, body))
        connection = self._take_idle()
        if connection is None:
            return _Opening(self, message, method == b"HEAD", arrival)
        connection.send(message, method == b"HEAD", arrival)
        return connection

    def break_off(self, reason: str, allowed: Callable[[], bool] = lambda: True) -> None:
        """Fails the requests that have no answer yet with a `BrokenError`, and closes the idle connections.

        Requests whose connection is still being opened fail too: the kernel may accept a connection for a process that
        is dead.

        Args:
            reason: the message of the error.
            allowed: called before each request; after the first ``False``, the other requests stay in flight.
        """
        self.close_idle()
        for opening in list(self.opening):
            if not allowed():
                return
            opening.fail(reason)
        for connection in [connection for connection in self.busy if connection.unanswered]:
            if not allowed():
                return
            connection.fail(reason, certain=True)

    def close(self) -> None:
        """Closes all connections."""
        for sending in list(self.opening):
            sending.close()
        for connection in list(self.busy):
            connection.fail("the router stops")
        self.close_idle()

    def release(self, connection: Connection) -> None:
        """Returns a connection to the pool, after its answer is complete."""
        self.busy.discard(connection)
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._trimming is None:
            self._trimming = self.loop.call_later(_IDLE_S, self._trim)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def connect(self) -> Connection:
        """Opens a connection. If the process has no free file descriptor, it retries until it has one.

        Raises:
            ConnectError: the connection could not be opened.
        """
        while True:
            try:
                return await self._connect()
            except ConnectError as error:
                # The server is not the cause, and requests in flight will soon free descriptors.
                if getattr(error.__cause__, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                    raise
                await asyncio.sleep(_FULL_S)

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectError(f"{type(error).__name__}: {error.strerror or error}") from error
        except UnicodeError as error:
            raise ConnectError(f"{self._host!r} cannot be a host's name: {error}") from error
        return connection

    def _trim(self) -> None:
        """Closes the connections that have been idle for too long; the list starts with the oldest."""
        before = time.monotonic() - _IDLE_S / 2
        old = 0
        while old < len(self._idle) and (self._idle[old].closed or self._idle[old].idle_since < before):
            self._idle[old].close()
            old += 1
        del self._idle[:old]
        self._trimming = self.loop.call_later(_IDLE_S / 2, self._trim) if self._idle else None

    def close_idle(self) -> None:
        """Closes the idle connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._trimming:
            self._trimming.cancel()
            self._trimming = None
