"""An HTTP/1.1 client for one server: an unbounded pool of connections, each with at most one request in flight.

Answers are parsed by httptools. States of a connection:

========== ========= =========== ==================================================================
State      `_answer` `_arrival`  Meaning
========== ========= =========== ==================================================================
idle       None                  no request; in `Upstream._idle`, unless it is new
unanswered set       not done    :meth:`Connection.request` waits; in `Upstream.busy`
streaming  set       done        the head was delivered, the body is being read; in `Upstream.busy`
closed     None                  never used again
========== ========= =========== ==================================================================

- Each request has its own parser, whose callbacks are those of its `BackendAnswer`.
- An answer without a body, or with a ``Content-Length`` of at most `_WHOLE_UP_TO` bytes, is delivered complete; other
  answers are delivered when their head is complete.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from reward_loop.errors import ServerError
from reward_loop.router.messages import HOP_BY_HOP, RawHeader, end_to_end, find, to_wire

_IDLE_S = 2.0
"""Connections that have been idle for this time, in seconds, are closed when another request ends, such as one of the
health checks. Servers that run in uvicorn close theirs after 5 s."""

_CONNECT_S = 10.0
"""The timeout for opening a connection, in seconds."""

_FULL_S = 0.05
"""The pause before a new attempt to connect when the process has no free file descriptor, in seconds."""

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


class MovedError(BrokenError):
    """The request was taken from a frozen server, which may still recover."""


class StaleError(BrokenError):
    """A reused connection broke before the first byte of the answer.

    Either the server closed the connection while it was idle, or the server died. A dead server's socket may still
    accept connections, because the process that restarts the server keeps the socket open.
    """


class BackendAnswer:
    """A server's answer: its head, and the part of the body received so far."""

    def __init__(self, connection: Connection, *, head_only: bool = False) -> None:
        self.status = 0
        """0 until the head is complete."""
        self.headers: list[RawHeader] = []
        """The end-to-end headers."""
        self.length: int | None = None
        """The value of ``Content-Length``."""
        self.complete = False
        """Whether the whole body has been received."""
        self.keeps_alive = False
        """Whether the connection can have another request after the complete answer."""
        self.size = 0
        """The number of buffered bytes of the body."""
        self.unproductive_bytes = 0
        """The number of bytes received since the beginning or the last part of the body."""
        self._connection = connection
        self._head_only = head_only
        self._hop_by_hop: list[RawHeader] = []
        self._parts: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None

    @property
    def begun(self) -> bool:
        """Whether any byte of the answer has been received."""
        return bool(self.unproductive_bytes or self.status)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body."""
        chunked = find(self._hop_by_hop, b"transfer-encoding") is not None
        return bool(self.status) and self.length is None and not chunked

    async def read(self) -> bytes:
        """Wait for the next part of the body, and return it; empty at the end of the body.

        Raises:
            BrokenError: the connection broke before the end.
        """
        while not self._parts and not self.complete:
            if self._error:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.size >= _BUFFER:
            self._connection.resume()
        return self.take()

    def take(self) -> bytes:
        """Return the received part of the body that has not been returned yet."""
        parts, self._parts = self._parts, []
        self.size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Discard the rest of the answer: closes the connection unless the answer is complete."""
        if not self.complete:
            self._connection.close()

    def add(self, part: bytes) -> None:
        """Append a received part of the body; pauses reading if the buffer is full."""
        self._parts.append(part)
        self.size += len(part)
        # An answer that is delivered complete has no reader yet, so it must not pause.
        if self.size >= _BUFFER and not self._connection.unanswered:
            self._connection.pause()
        if self._waiter:
            self.wake()

    def wake(self, error: UpstreamError | None = None) -> None:
        """Wake `read`; with an error, `read` raises it after the buffered parts."""
        self._error = self._error or error
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        # More than one answer: on a connection that is used again, the surplus would pass for the next answer.
        if self.complete:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # Ignore trailers.
            name = name.lower()
            (self._hop_by_hop if name in HOP_BY_HOP else self.headers).append((name, value))

    def on_headers_complete(self) -> None:
        status = self._connection.parser.get_status_code()
        # 101: the router forwards no `Upgrade`, so no server may switch protocols.
        if not 100 <= status <= 599 or status == 101:
            raise ValueError(f"status {status}")
        # An interim answer, such as 103: the final one follows, with headers of its own.
        if status < 200:
            self.headers.clear()
            self._hop_by_hop.clear()
            return
        self.status = status
        if self._hop_by_hop:
            self.headers = end_to_end(self.headers, self._hop_by_hop)
        if (length := find(self.headers, b"content-length")) is not None:
            self.length = int(length)
        if self._head_only:
            # The parser does not know that this answers a HEAD request, and would wait for a body.
            self.on_message_complete()
        elif (self.length is None or self.length > _WHOLE_UP_TO) and status not in NO_BODY:
            self._connection.deliver(self)

    def on_body(self, body: bytes) -> None:
        self.unproductive_bytes = 0
        if self._head_only:
            # A body where none may be: its end is unknown, so the next answer could not be found.
            self.keeps_alive = False
        else:
            self.add(body)

    def on_message_complete(self) -> None:
        # Also called after an interim answer, which leaves the status at 0.
        if self.status and not self.complete:
            self.complete = True
            self.keeps_alive = self._connection.parser.should_keep_alive()


class Connection(asyncio.Protocol):
    """One connection to a server, with at most one request in flight."""

    def __init__(self, upstream: Upstream) -> None:
        self.closed = False
        self.idle_since = 0.0
        """When the latest answer was complete, in seconds of `time.monotonic`; 0 before the first one."""
        self.parser: httptools.HttpResponseParser
        """The parser of the current request."""
        self._upstream = upstream
        self._transport: asyncio.Transport
        self._answer: BackendAnswer | None = None
        self._arrival: asyncio.Future[BackendAnswer]
        self._is_check = False

    @property
    def unanswered(self) -> bool:
        """Whether a request is in flight whose answer has not been delivered."""
        return self._answer is not None and not self._arrival.done()

    async def request(self, message: bytes, head_only: bool, is_check: bool) -> BackendAnswer:
        """Send the bytes of a request and wait for its answer, which has only a head for a HEAD request.

        See :meth:`Upstream.request`.
        """
        self._upstream.busy.add(self)
        self._is_check = is_check
        self._answer = answer = BackendAnswer(self, head_only=head_only)
        self._arrival = self._upstream.loop.create_future()
        # A new one: after the answer to a HEAD, the parser before still expects a body.
        self.parser = httptools.HttpResponseParser(answer)
        self._transport.write(message)
        try:
            return await self._arrival
        except asyncio.CancelledError:
            # If the answer is complete, the connection may already have another request.
            answer.close()
            raise

    def deliver(self, answer: BackendAnswer) -> None:
        """End the wait of `request`; its caller reads the rest of the answer, if any."""
        if not self._arrival.done():
            self._arrival.set_result(answer)

    def close(self) -> None:
        """Close the connection at once, and discard unsent data; the answer is not delivered any more."""
        self.closed = True
        self._answer = None
        self._upstream.busy.discard(self)
        self._transport.abort()

    def fail(self, reason: str, error: type[BrokenError] | None = None) -> None:
        """End the request in flight, if any, with an error: by default a `StaleError` or a `BrokenError`."""
        answer = self._answer
        self.close()
        if answer is None:
            return
        stale = self.idle_since and not answer.begun
        broken = (error or (StaleError if stale else BrokenError))(reason)
        if self._arrival.done():
            answer.wake(broken)
        else:
            self._arrival.set_exception(broken)

    def pause(self) -> None:
        """Stop reading from the server, if the connection is open."""
        if not self.closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read from the server, if the connection is open."""
        if not self.closed:
            self._transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._upstream.reads += not self._is_check
        answer = self._answer
        # Bytes without a request, such as a 408 before a close: the next request would take them for its answer.
        if answer is None:
            self.close()
            return
        wrong = None
        answer.unproductive_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            wrong = "the server switched to another protocol"
        except httptools.HttpParserError as error:
            wrong = f"the answer is not valid HTTP: {error.__context__ or error}"
        # Finish only after all bytes are parsed: another request may reuse the connection, and the remaining bytes are
        # not its answer.
        if answer.complete:
            self._finish(answer, keep=answer.keeps_alive and not wrong)
        elif wrong:
            self.fail(wrong)
        elif answer.unproductive_bytes > _HEAD_UP_TO:
            self.fail(f"the head of the answer is longer than {_HEAD_UP_TO} bytes")

    def eof_received(self) -> bool:
        if self._answer and self._answer.ends_with_connection:
            self._finish(self._answer, keep=False)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(str(error or "") or "the connection was closed before the end of the answer")

    def _finish(self, answer: BackendAnswer, *, keep: bool) -> None:
        self._answer = None
        answer.complete = True
        # If the server answered before it read the whole request, the connection cannot be reused.
        if keep and not self._transport.get_write_buffer_size():
            self.resume()
            self._upstream.release(self)
        else:
            self.close()
        if not self._arrival.done():
            self._arrival.set_result(answer)
        elif answer._waiter:
            answer.wake()


# Not aiohttp's client: a prototype of the router forwarded 9,387 requests/s with it, and 20,531 with this design.
class Upstream:
    """An HTTP client for one server, with a pool of connections.

    Each request in flight has its own connection. The most recently used idle connection is reused first.

    Create it in a running event loop, and call :meth:`close` at the end.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        api_key: sent as a bearer token with every request.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        self.loop = asyncio.get_running_loop()
        self.busy: set[Connection] = set()
        """The connections with a request in flight."""
        self._opening: dict[asyncio.Timeout, BrokenError | None] = {}
        """The connections that are being opened; `break_off` sets the error, and lets the timeout expire."""
        self.reads = 0
        """How many times bytes were received from the server, without those of health checks."""
        self._host = parts.hostname or ""
        # Created once, because it takes about 0.1 s; asyncio would create one for each connection.
        self._port = parts.port or 80
        own = [(b"host", parts.netloc.rpartition("@")[2].encode())]
        if api_key:
            own.append((b"authorization", b"Bearer " + api_key.encode()))
        self._own_headers = b" HTTP/1.1\r\n" + to_wire(own)
        self._idle: deque[Connection] = deque()
        """The idle connections, the oldest first."""

    def request(
        self, method: bytes, target: bytes, headers: bytes = b"", body: bytes = b"", *, is_check: bool = False
    ) -> Coroutine[Any, Any, BackendAnswer]:
        """Send a request and wait for its answer; cancelling it closes the connection.

        Args:
            method: the HTTP method.
            target: the path and the query, as in the request line.
            headers: header lines, with ``Content-Length`` if there is a body, and without ``Host``.
            body: the whole body.
            is_check: whether it is a health check, whose answer does not count in `reads`.

        Returns:
            the answer: complete if its length is known and at most `_WHOLE_UP_TO` bytes, else with its head.

        Raises:
            ConnectError: the connection could not be opened.
            StaleError: a reused connection broke before the first byte of the answer. The request can be repeated.
            BrokenError: the connection broke, or the answer is not valid HTTP.
        """
        message = b"".join((method, b" ", target, self._own_headers, headers, b"\r\n", body))
        connection = self._take_idle()
        if connection is None:
            return self._request_anew(message, method == b"HEAD", is_check)
        return connection.request(message, method == b"HEAD", is_check)

    async def _request_anew(self, message: bytes, head_only: bool, is_check: bool) -> BackendAnswer:
        return await (await self._open()).request(message, head_only, is_check)

    def break_off(self, reason: str, error: type[BrokenError] = BrokenError) -> None:
        """Fail the requests that have no answer yet with an error, and close the idle connections.

        Requests whose connection is still being opened fail too: the kernel may accept a connection for a process that
        is dead.
        """
        self.close_idle()
        for opening in [opening for opening, broken in self._opening.items() if not broken and not opening.expired()]:
            self._opening[opening] = error(reason)
            opening.reschedule(self.loop.time())
        for connection in [connection for connection in self.busy if connection.unanswered]:
            connection.fail(reason, error)

    def close(self) -> None:
        """Close all connections."""
        self.break_off("the router is stopping")
        for connection in list(self.busy):
            connection.fail("the router is stopping")

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool, after its answer is complete."""
        self.busy.discard(connection)
        connection.idle_since = now = time.monotonic()
        self._idle.append(connection)
        while self._idle[0].idle_since < now - _IDLE_S:
            self._idle.popleft().close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            # The newest: the server has least likely closed it, and the others become old enough to be closed.
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _open(self) -> Connection:
        """Open a connection. If the process has no free file descriptor, retry until it has one."""
        while True:
            opening = asyncio.timeout(_CONNECT_S)
            self._opening[opening] = None
            try:
                async with opening:
                    _, connection = await self.loop.create_connection(lambda: Connection(self), self._host, self._port)
                    return connection
            except TimeoutError:
                if broken := self._opening[opening]:
                    raise broken from None
                raise ConnectError(f"no connection within {_CONNECT_S:g} s") from None
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise ConnectError(f"{type(error).__name__}: {error.strerror or error}") from error
            except UnicodeError as error:
                raise ConnectError(f"{self._host!r} is not a valid host name: {error}") from error
            finally:
                del self._opening[opening]
            # The server is not the cause, and requests in flight will soon free descriptors.
            # The time limit of the request, or the timeout of the health check, bounds these attempts.
            await asyncio.sleep(_FULL_S)

    def close_idle(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
