"""uvicorn's HTTP protocol, with a bound on the length of a request's head, and with less to do for each request.

uvicorn collects a head for as long as one comes, writes the head and the body of an answer with a system call each, has
a task for every request and a timer after it. Here a request that came in one piece is first offered to `begin`, which
may serve it in callbacks; any other goes to the ASGI app as usual. What is left out are access logs, WebSockets, a root
path, and the check of header names and values: they come from httptools, which has checked them, or from the control
plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from reward_loop.router.headers import RawHeader, find, to_wire
from reward_loop.router.http_client import NO_BODY
from reward_loop.router.proxy import Client
from reward_loop.router.request import Receive, Scope, Send
from reward_loop.router.router_error import Refusal

__all__ = ["protocol_for"]

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

NOT_HTTP = "the request is not valid HTTP/1.1"

_CONNECTION = frozenset({b"connection"})
_CLOSE = b"connection: close\r\n\r\n"

_ASGI = {"version": "3.0", "spec_version": "2.3"}


def protocol_for(max_head_bytes: int, begin: Callable[[Client], bool]) -> Callable[..., asyncio.Protocol]:
    """What makes protocols for uvicorn.

    Args:
        max_head_bytes: longer heads are refused with 431, or with 414 where it is the URL that is too long.
        begin: takes a request whose body is there, or says that it is one for the ASGI app.
    """
    return partial(_Protocol, max_head_bytes, begin)


class _Protocol(HttpToolsProtocol):
    cycle: Any
    """The request that came last."""

    def __init__(self, max_head_bytes: int, begin: Callable[[Client], bool], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What is read for each request is no attribute of the class: Python 3.11 takes long to find those.
        self._max_head_bytes = max_head_bytes
        self._begin = begin
        self._served: _Cycle | None = None
        """The request in work, or the last one that was."""
        self._unserved: _Cycle | None = None
        """One whose turn it is, while it is not known whether its body has come with it."""
        self._upgrading = False
        """While a head is parsed that asks for another protocol."""
        self._in_head = True
        self._head_bytes = 0
        self._idle_since = 0.0
        self._parting = False
        """After the last answer, while the client still sends."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._set_timer(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        if self._parting:
            return None
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            url_is_too_long = self._in_head and len(self.url) > self._max_head_bytes
            return self._refuse(self._too_long() if url_is_too_long else Refusal(400, NOT_HTTP, close=True))
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading:
                return self._stay(data[upgrade.args[0] :])
        # Not within the parser, which would take an exception for a request that is not HTTP.
        if self._unserved and not self.transport.is_closing():
            self._serve(self._unserved)
        # What has come may have ended the head; then the rest is the body's.
        if self._in_head and self._head_bytes > self._max_head_bytes and not self.transport.is_closing():
            self._refuse(self._too_long())
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()
        self.pipeline.clear()
        if self._served and not self._served.response_complete:
            self._served.leave()

    def on_message_begin(self) -> None:
        self._in_head = True
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # It is a trailer.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self.url) > self._max_head_bytes:
            raise ValueError("the URL is too long")  # The parser stops, and `data_received` answers.
        self._in_head = False
        self._head_bytes = 0
        if self.parser.should_upgrade():
            upgrade = find(self.headers, b"upgrade")
            if upgrade and upgrade.lower() != b"websocket":
                self._upgrading = True
                return
        before = self.cycle
        self.cycle = cycle = _Cycle(self)
        if before is None or before.response_complete:
            self._unserved = cycle
        else:
            # The client did not wait for the answer to its last request.
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.set()

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        # The first bytes of the next head come before its beginning is parsed.
        self._in_head = True
        self.cycle.more_body = False
        self.cycle.set()

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._serve(self.pipeline.pop()[0])
        else:
            self._idle_since = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        # One timer for all requests: it looks when the last one was, or if none came.
        idle = self.cycle is None or self.cycle.response_complete
        left = self._idle_since + self.timeout_keep_alive - self.loop.time() if idle else self.timeout_keep_alive
        if left > 0:
            self._set_timer(left)
        else:
            super().timeout_keep_alive_handler()

    def _set_timer(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _cancel_timer(self) -> None:
        if self.timeout_keep_alive_task:
            self.timeout_keep_alive_task.cancel()

    def _serve(self, cycle: Any) -> None:
        self._unserved = None
        self._served = cycle
        # A task waits for a client that does not read its answers; callbacks do not.
        if cycle.more_body or self.flow.write_paused or not self._begin(cycle):
            self._start_asgi_task(cycle, self.app)
        elif self.flow.read_paused and not self.pipeline:
            # Its body was long, and is there; now its leaving is to be noticed.
            self.flow.resume_reading()

    def _stay(self, rest: bytes) -> None:
        """Reads a request without its wish for another protocol, which may be ignored (RFC 9110, 7.8).

        The parser would take the request's body for bytes of that protocol.
        """
        self._upgrading = False
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, to_wire(self.headers, {b"upgrade"}))
        self.data_received(head + rest)

    def _too_long(self) -> Refusal:
        if len(self.url) > self._max_head_bytes // 2:
            return Refusal(
                414, f"the URL is too long: a request's head may have {self._max_head_bytes} bytes", close=True
            )
        return Refusal(431, f"the head of the request is longer than {self._max_head_bytes} bytes", close=True)

    def _refuse(self, refusal: Refusal) -> None:
        headers, body = refusal.render()
        self.transport.write(b"%b%b\r\n%b" % (_status_line(refusal.status), to_wire(headers), body))
        if self._served is None or self._served.response_complete:
            self.part()
        else:
            self.transport.close()

    def part(self) -> None:
        """Ends the connection of a client that still sends. What comes is thrown away, until the client closes it
        or time is up.

        Closed here at once, it would be reset, and the client might lose its answer (RFC 9112, 9.6).
        """
        self._parting = True
        if not self.transport.is_closing():
            self.transport.write_eof()


class _Cycle(RequestResponseCycle):
    """One request and its answer, for ASGI and as a `Client`."""

    body: bytes  # type: ignore[assignment]
    disconnected = False
    response_started = False
    chunked_encoding = False
    expected_content_length = 0
    on_leave: Callable[[], None] | None = None
    _head = b""
    _news = False

    def __init__(self, protocol: _Protocol) -> None:
        parser = protocol.parser
        self.method = parser.get_method().decode("ascii")
        self.path, self.target = _parse_target(protocol.url)
        self.headers = protocol.headers
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.on_response = protocol.on_response_complete
        self._protocol = protocol
        self._version = version = parser.get_http_version()
        self.keep_alive = version != "1.0" and parser.should_keep_alive()
        self.body = b""
        self.more_body = True
        self.response_complete = False
        self._waiter: asyncio.Future[None] | None = None
        self.waiting_for_100_continue = protocol.expect_100_continue

    @property
    def scope(self) -> Any:  # type: ignore[override]
        """ASGI's; made for those who go that way."""
        protocol = self._protocol
        raw_path, _, query = self.target.partition(b"?")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": self._version,
            "server": protocol.server,
            "client": protocol.client,
            "scheme": protocol.scheme,
            "method": self.method,
            "root_path": "",
            "path": self.path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "state": protocol.app_state,
        }

    @property
    def message_event(self) -> Any:  # type: ignore[override]
        """Itself; as an attribute, each request would be garbage that only the collector gets rid of."""
        return self

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends a whole answer, whose headers say how long it is."""
        self.response_started = True
        end = b"\r\n" if self.keep_alive else _CLOSE
        if self.method == "HEAD":
            body = b""
        self.transport.write(b"".join((_status_line(status), to_wire(headers), end, body)))
        self._end()

    def go_on(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Leaves the rest to an ASGI app, in a task."""
        self._protocol._start_asgi_task(self, app)  # type: ignore[arg-type]

    def leave(self) -> None:
        """The client is gone."""
        self.disconnected = True
        self.set()
        if self.on_leave:
            self.on_leave()

    def set(self) -> None:
        """There is something to receive."""
        self._news = True
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not (self._news or self.disconnected or self.response_complete):
            self.flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, b""
        self.flow.resume_reading()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif self.response_complete:
            raise RuntimeError("the answer is complete already")
        else:
            self._continue(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Any) -> None:
        self.response_started = True
        head = _status_line(status) + to_wire(headers, _CONNECTION)
        # A client that was not told to send its body may send it or not.
        if find(headers, b"connection") == b"close" or (self.waiting_for_100_continue and self.more_body):
            self.keep_alive = False
        self.waiting_for_100_continue = False
        if self.method == "HEAD" or status in NO_BODY:
            pass
        elif (length := find(headers, b"content-length")) is None:
            self.chunked_encoding = True
            head += b"transfer-encoding: chunked\r\n"
        else:
            self.expected_content_length = int(length)
        # It waits for the body, of which the first part is written together with it.
        self._head = head + (b"\r\n" if self.keep_alive else _CLOSE)

    def _continue(self, body: bytes, more: bool) -> None:
        head, self._head = self._head, b""
        if self.method == "HEAD":
            body = b""
        elif self.chunked_encoding:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("the body is not as long as Content-Length says")
        self.transport.write(head + body if head else body)
        if not more:
            self._end()
            self.set()

    def _end(self) -> None:
        self.response_complete = True
        self.body = b""
        if not self.keep_alive:
            if self.more_body:
                self._protocol.part()
            else:
                self.transport.close()
        self.on_response()


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


@lru_cache(maxsize=64)
def _parse_target(url: bytes) -> tuple[str, bytes]:
    """The path, decoded, and path and query as they are written."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"#")[0].partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query
    path = raw_path.decode("ascii")
    target = b"%b?%b" % (raw_path, query) if query else raw_path
    return unquote(path) if "%" in path else path, target
