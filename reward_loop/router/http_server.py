"""An HTTP/1.1 server, parsed by httptools: one task for each request, and limits on heads.

Invariants of a connection:

- It has at most one request, `_request`, from its complete head until it has been answered and received completely.
- `_task` serves that request. It may end before the body is received.
- After an error of the client, nothing more is parsed, and the connection closes after the answer. A request that
  arrives before the answer to the one before it (pipelining) is such an error; only the first one is answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools

from reward_loop.router.messages import RawHeader, Refusal, body_too_long, find, to_wire

_UNREAD_UP_TO = 64 * 1024
"""Reading from the client pauses while more bytes of a body than this wait to be read."""

_MAX_HEAD_BYTES = 64 * 1024
"""Longer heads are refused with 431, or with 414 if the URL is too long."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def _resume(transport: asyncio.Transport) -> None:
    """Continue to read from a client, if the connection is open."""
    if not transport.is_closing():
        transport.resume_reading()


class WaitsFor(StrEnum):
    """What a request waits for, if not for the answer of a server."""

    BODY = "its body"
    SERVER = "a server"


class ClientRequest:
    """One request of a client, and its answer.

    The answer is sent with :meth:`answer`, or in parts with :meth:`start`, :meth:`write` and :meth:`end`.

    Args:
        transport: that of the connection.
        writable: set while the write buffer has room. It fills if the client does not read its answers.
        method: the HTTP method.
        url: the URL of the request line; the parser's `HttpParserInvalidURLError` is raised if it is invalid.
        version: the HTTP version, such as ``1.1``.
        headers: names in lower case, and values.
        keep_alive: whether the connection stays open after the answer.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        writable: asyncio.Event,
        method: str,
        url: bytes,
        version: str,
        headers: list[RawHeader],
        *,
        keep_alive: bool,
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
        self.late = False
        """Whether the task was cancelled because the time limit of a request has passed."""
        self.waits_for: str = WaitsFor.BODY
        """A `WaitsFor`, or the URL of the server whose answer the request waits for."""
        self.task: asyncio.Task[None]
        """The task that serves the request."""
        self._transport = transport
        self._writable = writable
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = 0
        self._received: asyncio.Future[None] | None = None
        self._chunked = False

    @property
    def address(self) -> str | None:
        """The IP address of the client; ``None`` if its connection is a Unix socket."""
        peer = self._transport.get_extra_info("peername")
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
                self._transport.pause_reading()
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
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._limit = limit
        self._received = asyncio.get_running_loop().create_future()
        _resume(self._transport)
        await self._received
        return b"".join(self._parts)

    def _expects_continue(self) -> bool:
        """Return whether the client sends the body only after a ``100 Continue``."""
        return (find(self.headers, b"expect") or b"").lower() == b"100-continue"

    # The answer

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Send a complete answer; `headers` include ``Content-Length``. For HEAD requests, the body is left out."""
        self.answered = True
        self._transport.write(self._message(status, headers, b"", b"" if self.method == "HEAD" else body))

    def answer_json(self, body: bytes) -> None:
        """Send a complete answer with status 200."""
        self.answer(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body)

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
        self._transport.write(self._message(status, headers, framing, b""))

    async def write(self, part: bytes) -> None:
        """Send a part of the body, which is not empty; wait while the client does not read."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        await self._writable.wait()

    def end(self) -> None:
        """End the body."""
        self.answered = True
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")

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


logger = logging.getLogger(__name__)

_BACKLOG = 4096

_ACCEPTS = 64
"""The most connections accepted before the event loop runs other callbacks."""

_FULL_S = 0.05
"""The pause before the next attempt to accept when the process has no free file descriptor, in seconds."""

_ABORT_S = 5.0
"""Seconds that cancelled requests have to end when the server stops."""


class HttpServer:
    """An HTTP/1.1 server.

    Create it in a running event loop.

    Args:
        handler: serves a request, in a task of its own. The task is cancelled when the client disconnects. After a
            :class:`~reward_loop.router.http_server.ClientRequest` without a complete answer, the connection is
            closed.
        keep_alive_s: connections without a request are closed after this time, in seconds, and those whose client
            does not read its answer. It is longer than clients keep idle connections, so that the client closes them,
            not the server.
        max_connections: further connections wait in the kernel's backlog; ``None`` for no bound. When three quarters
            are in use, each connection closes after its answer, so that idle ones do not keep others waiting.
    """

    def __init__(
        self,
        handler: Callable[[ClientRequest], Awaitable[None]],
        keep_alive_s: float = 75.0,
        max_connections: int | None = None,
    ) -> None:
        self.handler = handler
        self.keep_alive_s = keep_alive_s
        self.loop = asyncio.get_running_loop()
        self._max_connections = max_connections
        self.crowded = False
        """Whether three quarters of the connections are in use."""
        self._connections: set[_Connection] = set()
        self._opening: set[asyncio.Task[object]] = set()
        """Accepted sockets that are not yet a connection."""
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._listener: socket.socket | None = None
        """``None`` before the start, and from the stop on."""
        self._accepting = False

    @property
    def _open(self) -> int:
        return len(self._connections) + len(self._opening)

    def start(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket, which it closes in the end."""
        self._listener = listener
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._accept_again()

    async def stop(self) -> None:
        """Accept no more connections, and cancel the requests in flight."""
        self._pause()
        if self._listener:
            self._listener.close()
            self._listener = None
        if self._opening:  # Not cancelled: uvloop would leave connections that read nothing.
            await asyncio.wait(self._opening)
        for connection in list(self._connections):
            connection.abort()
        try:
            async with asyncio.timeout(_ABORT_S):
                await self._none_left.wait()
        except TimeoutError:
            logger.error(
                "%d requests did not end within %g s after their cancellation", len(self._connections), _ABORT_S
            )

    def add(self, connection: _Connection) -> None:
        """Record an open connection."""
        self._connections.add(connection)
        self._none_left.clear()
        self._count()

    def discard(self, connection: _Connection) -> None:
        """Record that a connection is closed, and that its task has ended."""
        self._connections.discard(connection)
        self._count()
        if not self._connections:
            self._none_left.set()
        self._accept_again()

    def _count(self) -> None:
        # At each change, not for each request.
        self.crowded = self._max_connections is not None and 4 * self._open > 3 * self._max_connections

    # Connections are accepted here, not by `create_server`: that accepts all that the kernel offers, and where the
    # process has no free file descriptor, libuv resets them. A connection that is not accepted waits.

    def _accept_again(self) -> None:
        if self._listener and not self._accepting:
            self._accepting = True
            # By its number: uvloop would delay the closing of a socket object.
            self.loop.add_reader(self._listener.fileno(), self._accept, self._listener)

    def _pause(self) -> None:
        if self._listener and self._accepting:
            self._accepting = False
            self.loop.remove_reader(self._listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            if self._max_connections is not None and self._open >= self._max_connections:
                self._pause()  # `discard` continues.
                return
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # With a pause: while the listener stays readable, the event loop would call this again at once.
                logger.error("no connection can be accepted: %s", error)
                self._pause()
                self.loop.call_later(_FULL_S, self._accept_again)
                return
            opening = self.loop.create_task(self.loop.connect_accepted_socket(lambda: _Connection(self), accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        # Until now, the connection was counted twice, so accepting may have paused with fewer open than permitted.
        self._opening.discard(opening)
        self._count()
        self._accept_again()


class _Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more bytes after a request with "Connection: close"; they are ignored.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._transport: asyncio.Transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._timer: asyncio.TimerHandle
        self._unread: asyncio.TimerHandle | None = None
        """Closes the connection while its client does not read."""
        self._request: ClientRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped_parsing = False
        """Whether received bytes are discarded: after an error, and after the last answer."""
        self._lost = False
        self._idle_since = server.loop.time()
        self._url = b""
        self._headers: list[RawHeader] = []
        self._head_up_to = 0
        """An upper bound for the length of a head that ends within the bytes that are being parsed."""
        self._unproductive_bytes = 0
        """The number of bytes received since the last complete head, part of a body, or complete request."""

    def abort(self) -> None:
        """Close the connection at once, and cancel the request in flight."""
        self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.add(self)
        self._timer = self._server.loop.call_later(self._server.keep_alive_s, self._check_idle)

    def data_received(self, data: bytes) -> None:
        if self._stopped_parsing:
            return
        self._unproductive_bytes += len(data)
        self._head_up_to = self._unproductive_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            refusal = error.__context__  # The exception of a callback.
            if not isinstance(refusal, Refusal):
                refusal = Refusal(400, "the request is not valid HTTP/1.1", close=True)
            self._fail(refusal)
            return
        except httptools.HttpParserUpgrade as upgrade:
            if not self._wants_websocket():
                self._ignore_upgrade(data[upgrade.args[0] :])
                return
        if self._unproductive_bytes > _MAX_HEAD_BYTES:
            self._fail(self._too_long())
        else:
            # Called after parsing, so that a body that arrived with the head is complete when its task starts.
            self._serve()

    def pause_writing(self) -> None:
        # With a bound: a client that does not read would keep its connection, an open file, for as long as it wishes.
        self._writable.clear()
        self._unread = self._server.loop.call_later(self._server.keep_alive_s, self.abort)

    def resume_writing(self) -> None:
        self._writable.set()
        if self._unread:
            self._unread.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._timer.cancel()
        if self._unread:
            self._unread.cancel()
        # With a task, `_end` discards the connection later: the server's stop waits for the task, too.
        if self._task:
            self._cancel(self._task)
        else:
            self._server.discard(self)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if self._request or not self._writable.is_set():
            raise Refusal(400, "a request arrived before the client had read the answer to the last one", close=True)
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is None:  # Ignore trailers.
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        if self._head_up_to > _MAX_HEAD_BYTES:
            # Only now exactly: nearly all heads are far below the limit.
            length = len(self._url) + sum(len(name) + len(value) + 4 for name, value in headers)
            if length > _MAX_HEAD_BYTES:
                raise self._too_long()  # It is the context of the error that the parser raises.
        upgrades = parser.should_upgrade()
        # `_ignore_upgrade` parses the request again.
        if upgrades and not self._wants_websocket():
            return
        version = parser.get_http_version()
        self._request = ClientRequest(
            self._transport,
            self._writable,
            parser.get_method().decode("ascii"),
            self._url,
            version,
            headers,
            # The parser does not parse a request that follows an upgrade.
            keep_alive=(version != "1.0" and parser.should_keep_alive() and not upgrades and not self._server.crowded),
        )
        self._unproductive_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._unproductive_bytes = 0
        if self._request:
            self._request.add(body)

    def on_message_complete(self) -> None:
        if self._request:
            self._unproductive_bytes = 0
            self._request.end_body()
            # It was answered before its body ended: only now another request may follow.
            if self._request.answered and not self._task:
                self._request = None

    def _wants_websocket(self) -> bool:
        """Return whether a request for an upgrade asks for a WebSocket; other upgrades are ignored."""
        upgrade = find(self._headers, b"upgrade")
        return not upgrade or upgrade.lower() == b"websocket"

    # Requests

    def _serve(self) -> None:
        """Start the task of the request, if it has none yet."""
        request = self._request
        if request and not self._task and not request.started:
            self._task = request.task = self._server.loop.create_task(self._handle(request))
            _resume(self._transport)  # While the request is in flight, only reading detects a disconnect.

    async def _handle(self, request: ClientRequest) -> None:
        try:
            await self._server.handler(request)
        except Exception:
            logger.exception("%s failed", request.name)
            request.refuse(Refusal(500, "the router failed; its log shows the cause", close=True))
        finally:
            self._end()

    def _cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        # If the task has not started, its `finally` does not run.
        task.add_done_callback(lambda ended: self._end() if ended is self._task else None)

    def _end(self) -> None:
        """Handle the end of the task of the request."""
        request, self._task = self._request, None
        assert request is not None
        self._idle_since = self._server.loop.time()
        if self._lost:
            self._server.discard(self)
        elif request.answered and request.keep_alive:
            if request.body_complete:
                self._request = None
            _resume(self._transport)  # Nothing may have read the body.
        elif request.answered and (self._stopped_parsing or not request.body_complete):
            self._linger()
        else:
            self._stopped_parsing = True
            self._transport.close()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its ``Upgrade`` header, which a server may ignore (RFC 9110, 7.8).

        With the header, the parser would not parse the request's body.
        """
        # The bytes of the head are parsed, and counted, again.
        self._unproductive_bytes = 0
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, to_wire(self._headers, {b"upgrade"}))
        self.data_received(head + rest)

    # The end of the connection

    def _fail(self, error: Refusal) -> None:
        """Stop parsing, and answer with the error, unless the bytes of the request were valid."""
        self._stopped_parsing = True
        if self._request and self._request.body_complete:
            self._request.keep_alive = False
            self._serve()
            return
        request = self._request or ClientRequest(self._transport, self._writable, "", b"/", "1.1", [], keep_alive=False)
        request.refuse(error)
        if self._task:
            self._cancel(self._task)
        else:
            self._linger()

    def _too_long(self) -> Refusal:
        if self._request is None and len(self._url) > _MAX_HEAD_BYTES // 2:
            message = f"the URL is too long: the head of a request may have {_MAX_HEAD_BYTES} bytes"
            return Refusal(414, message, close=True)
        message = f"the head or the trailer of the request is longer than {_MAX_HEAD_BYTES} bytes"
        return Refusal(431, message, close=True)

    def _linger(self) -> None:
        """Close the sending side of the connection while the client still sends; received bytes are discarded.

        The connection closes when the client closes it, or after the keep-alive timeout. An immediate close would
        reset the connection, and the client might lose its answer (RFC 9112, 9.6).
        """
        self._stopped_parsing = True
        self._idle_since = self._server.loop.time()
        _resume(self._transport)
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _check_idle(self) -> None:
        # One timer for the whole connection: it closes the connection, or restarts with the time that is left.
        server = self._server
        left = server.keep_alive_s
        # With a task, the time limit of the request applies.
        if not self._task:
            left += self._idle_since - server.loop.time()
        if left > 0:
            self._timer = server.loop.call_later(left, self._check_idle)
        else:
            # Not `close`, which waits until the client has read what is buffered.
            self._transport.abort()
