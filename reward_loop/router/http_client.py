"""A small HTTP/1.1 client for one server: pooled connections without a cap, parsed by httptools."""

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
"""Answers of a known length up to this are awaited whole: should one break off, it can still be asked for again."""

_BUFFER = 256 * 1024
"""Reading pauses while this much of an answer waits to be passed on."""

_HEAD_UP_TO = 64 * 1024
"""Bytes that may arrive without a byte of the body: longer heads, trailers and chunk extensions are errors."""

_IDLE_S = 4.0
"""An idle connection is closed after this time: uvicorn's servers close theirs after 5 s."""

_FULL_S = 0.05
"""Between two looks whether a file can be opened again."""

NO_BODY = frozenset({204, 304})
"""Statuses of answers without a body, whatever their headers say."""


class UpstreamError(ServerError):
    """A server gave no whole answer."""


class ConnectError(UpstreamError):
    """It could not be connected to, so the request has not reached it."""


class BrokenError(UpstreamError):
    """The connection broke, or what came is not HTTP."""


class StaleError(BrokenError):
    """A connection that was used before broke, without a byte of the answer.

    Either the server closed it while it was idle, or the server died with the request. In the second case its socket
    may still accept connections, as a process that restarts it keeps the socket open.
    """


class Arrival(Protocol):
    """What is told when an answer is there, or will not come; an `asyncio.Future` is one."""

    def done(self) -> bool:
        """Whether nobody wants to know."""

    def set_result(self, answer: Answer, /) -> None:
        """It is there: all of it if it is of a known, moderate length, else its head."""

    def set_exception(self, error: UpstreamError, /) -> None:
        """The connection broke first."""


class Sending(Protocol):
    """A request on its way."""

    def close(self) -> None:
        """Gives it up; nobody is told any more."""


class Answer:
    """A server's answer: its head, and its body as far as it has come."""

    __slots__ = ("_connection", "_error", "_parts", "_waiter", "complete", "headers", "length", "size", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: list[RawHeader] = []
        """Those that are not about the connection to the server."""
        self.length: int | None = None
        """What ``Content-Length`` says."""
        self.complete = False
        """Whether the body has come to its end."""
        self.size = 0
        """How many bytes of the body wait to be read."""
        self._parts: list[bytes] = []
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None

    def take(self) -> bytes:
        """What has come of the body since the last time."""
        parts, self._parts = self._parts, []
        if self.size >= _BUFFER:
            self._connection.resume()
        self.size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """The next part of the body, as soon as there is one; empty at its end.

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
        """Gives up what has not come yet, by closing the connection."""
        if not self.complete:
            self._connection.close()

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)
        # One that is awaited whole has no reader yet.
        if self.size >= _BUFFER and not self._connection.unanswered:
            self._connection.pause()
        self.wake()

    def wake(self, error: UpstreamError | None = None) -> None:
        self._error = self._error or error
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One connection to a server, with at most one request on its way."""

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
        """Whether an answer has come over it."""
        self.heard = False
        """Whether anything has come since the request was sent."""
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
        """Whether a request waits for its answer to begin."""
        return self._answer is not None and self._arrival is not None

    def send(self, message: bytes, head_only: bool, arrival: Arrival) -> None:
        """Sends a request; `arrival` is told of its answer."""
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
        """Closes it at once, without waiting for what is still to be written; nobody is told any more."""
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
        if not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
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
        # Not before all bytes are parsed: the arrival may send the next request over this connection, and these bytes
        # are no answer to that request.
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
        if not self._in_body:  # Otherwise it is a trailer.
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
            # The parser would wait for a body: it does not know what was asked.
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
        # A server may answer before it has read everything: such a connection is of no more use.
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
    """A request whose connection is being made."""

    __slots__ = ("_arrival", "_connection", "_task", "_upstream")

    def __init__(self, upstream: Upstream, message: bytes, head_only: bool, arrival: Arrival) -> None:
        self._upstream = upstream
        self._arrival = arrival
        self._connection: Connection | None = None
        upstream.opening.add(self)
        self._task = upstream.loop.create_task(self._send(message, head_only))
        # A task that is cancelled before its first step does not reach its own `finally`.
        self._task.add_done_callback(lambda _: upstream.opening.discard(self))

    def close(self) -> None:
        """Cancels the request; its arrival gets neither an answer nor an error."""
        self._task.cancel()
        if self._connection:
            self._connection.close()

    def fail(self, reason: str) -> None:
        """Ends the request with an error. To be called only while the connection is being made."""
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
    """The connections to one server.

    There are as many as requests in flight; the one used last is used next, and idle ones are closed after some
    seconds.

    To be made in a running event loop.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        api_key: sent as a bearer token with every request.
        via: the name of this router, sent in a ``Via`` header with every request.
        connect_timeout_s: seconds until a connection must be made.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, via: bytes = b"", connect_timeout_s: float = 10.0
    ) -> None:
        parts = urlsplit(url)
        self.loop = asyncio.get_running_loop()
        self.busy: set[Connection] = set()
        """The connections with a request on its way."""
        self.opening: set[_Opening] = set()
        """The requests that wait for a connection."""
        self.reads = 0
        """How often bytes have arrived from the server."""
        self._host = parts.hostname or ""
        # Made once: it takes long, and asyncio would make one for each connection.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._connect_timeout_s = connect_timeout_s
        own = [(b"host", parts.netloc.rpartition("@")[2].encode())]
        if api_key:
            own.append((b"authorization", b"Bearer " + api_key.encode()))
        self._own_headers = b" HTTP/1.1\r\n" + to_wire(own)
        # After the client's headers: the entries of `Via` are in the order of the routers (RFC 9110, 7.6.3).
        self._head_end = b"via: 1.1 %b\r\n\r\n" % via if via else b"\r\n"
        self._idle: list[Connection] = []
        self._trimming: asyncio.TimerHandle | None = None

    async def request(self, method: bytes, target: bytes, headers: bytes = b"", body: bytes = b"") -> Answer:
        """Sends a request and waits for its answer: its head, or all of it if it is of a known, moderate length.

        Cancelling it closes the connection.

        Args:
            method, target: as they stand in the request line.
            headers: header lines (see :func:`~reward_loop.router.headers.to_wire`), with the length of the body, and
                without ``Host``.
            body: the whole body.

        Raises:
            ConnectError: no connection could be made.
            StaleError: a connection that was used before broke, without a byte of the answer.
            BrokenError: the connection broke.
        """
        arrival: asyncio.Future[Answer] = self.loop.create_future()
        sending = self.send(arrival, method, target, headers, body)
        try:
            return await arrival
        except asyncio.CancelledError:
            sending.close()
            raise

    def send(self, arrival: Arrival, method: bytes, target: bytes, headers: bytes = b"", body: bytes = b"") -> Sending:
        """Sends a request, at once if a connection is idle; `arrival` gets its answer or its error.

        After a :class:`StaleError` the request can be repeated: the server has not begun to answer.

        Returns:
            the request in flight; closing it cancels it.
        """
        message = b"".join((method, b" ", target, self._own_headers, headers, self._head_end, body))
        connection = self._take_idle()
        if connection is None:
            return _Opening(self, message, method == b"HEAD", arrival)
        connection.send(message, method == b"HEAD", arrival)
        return connection

    def break_off(self, reason: str, allowed: Callable[[], bool] = lambda: True) -> None:
        """Fails the requests whose answers have not begun, and closes the idle connections.

        Requests whose connection is still being made fail too: the kernel may accept the connection for a process that
        is dead.

        Args:
            reason: the message of their error.
            allowed: asked before each request; the first ``False`` leaves the other requests in flight.
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
        """Takes a connection back whose answer is complete."""
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
        """A new connection. Where this process may open no more files, it waits until it may.

        Raises:
            ConnectError: it could not be made.
        """
        while True:
            try:
                return await self._connect()
            except ConnectError as error:
                # It is not the server's fault, and soon over: there are requests in work.
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
        """Closes the connections that have been idle for long; the oldest ones are in front."""
        before = time.monotonic() - _IDLE_S / 2
        old = 0
        while old < len(self._idle) and (self._idle[old].closed or self._idle[old].idle_since < before):
            self._idle[old].close()
            old += 1
        del self._idle[:old]
        self._trimming = self.loop.call_later(_IDLE_S / 2, self._trim) if self._idle else None

    def close_idle(self) -> None:
        """Closes the connections that no request uses."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._trimming:
            self._trimming.cancel()
            self._trimming = None
