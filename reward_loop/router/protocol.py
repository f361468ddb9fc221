"""uvicorn's HTTP protocol, with a limit on the length of a request's head, and less work for each request.

Differences from uvicorn's `HttpToolsProtocol`:

- A head that is too long is refused with 431 or 414; uvicorn has no limit.
- A request whose body has arrived completely is first offered to `begin`, which may serve it in callbacks. uvicorn
  creates a task for every request. All other requests go to the ASGI app.
- The head and the first part of the body are written with one system call; uvicorn uses two.
- One keep-alive timer serves the whole connection; uvicorn starts one after each request.
- There are no access logs, no WebSockets, no root path, and no check of the names and values of answer headers: they
  come from httptools, which has checked them, or from the router itself.

Invariants of a connection:

- Requests are served one at a time, in their order. Requests that arrive early (pipelining) wait in `pipeline`, and
  reading pauses.
- `cycle` is the request received last, `_served` the one served last. `_unserved` is set only within `data_received`,
  between the end of a head and the end of the received bytes.
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
    """Returns a protocol factory for uvicorn's ``http`` option.

    Args:
        max_head_bytes: longer heads are refused with 431, or with 414 if the URL is too long.
        begin: receives each request with a complete body; returns whether it serves the request. If not, the ASGI app
            does.
    """
    return partial(_Protocol, max_head_bytes, begin)


class _Protocol(HttpToolsProtocol):
    cycle: Any
    """The request received last."""

    def __init__(self, max_head_bytes: int, begin: Callable[[Client], bool], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_head_bytes = max_head_bytes
        self._begin = begin
        self._served: _Cycle | None = None
        """The request that is being served, or that was served last."""
        self._unserved: _Cycle | None = None
        """The next request to serve, while the received bytes, which may contain its body, are being parsed."""
        self._upgrading = False
        """Whether the request asks for an upgrade to another protocol, which the router ignores."""
        self._in_head = True
        self._head_bytes = 0
        self._idle_since = 0.0
        self._parting = False
        """Whether the last answer has been sent, and further received bytes are discarded."""

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
        # Called after parsing: within a parser callback, an exception would be reported as an invalid request.
        if self._unserved and not self.transport.is_closing():
            self._serve(self._unserved)
        # If the head ended within these bytes, `_in_head` is False: the rest belongs to the body.
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
            return  # Ignore trailers.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self.url) > self._max_head_bytes:
            raise ValueError("the URL is too long")  # The parser raises HttpParserError; `data_received` answers.
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
            # Pipelining: the previous request has not been answered yet.
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
        # Set here, because `data_received` counts the next bytes as a head before `on_message_begin` is called.
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
        # One timer for the whole connection: it closes the connection, or restarts with the time that is left.
        idle = self._parting or self.cycle is None or self.cycle.response_complete
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
        # If the client does not read its answers, use a task: a task can wait, callbacks cannot.
        if cycle.more_body or self.flow.write_paused or not self._begin(cycle):
            self._start_asgi_task(cycle, self.app)
        elif self.flow.read_paused and not self.pipeline:
            # Reading was paused because of a long body, which is complete now. Resume it to detect a disconnect.
            self.flow.resume_reading()

    def _stay(self, rest: bytes) -> None:
        """Parses a request again without its ``Upgrade`` header, which a server may ignore (RFC 9110, 7.8).

        With the header, the parser would not parse the request's body.
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
        """Closes the sending side of the connection while the client still sends; received bytes are discarded.

        The connection closes when the client closes it, or after the keep-alive timeout. An immediate close would
        reset the connection, and the client might lose its answer (RFC 9112, 9.6).
        """
        self._parting = True
        self._idle_since = self.loop.time()
        if not self.transport.is_closing():
            self.transport.write_eof()


class _Cycle(RequestResponseCycle):
    """One request and its answer, as ASGI's `receive` and `send`, and as a `Client` for the callback path."""

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
        """The ASGI scope; created on demand, because the callback path does not need it."""
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
        """Returns the cycle itself: it implements `set`, the method that uvicorn calls on the event.

        A stored reference to itself would be a reference cycle, which only the garbage collector frees.
        """
        return self

    def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends a complete answer; `headers` include ``Content-Length``."""
        self.response_started = True
        end = b"\r\n" if self.keep_alive else _CLOSE
        if self.method == "HEAD":
            body = b""
        self.transport.write(b"".join((_status_line(status), to_wire(headers), end, body)))
        self._end()

    def go_on(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Starts a task in which an ASGI app serves the rest of the request."""
        self._protocol._start_asgi_task(self, app)  # type: ignore[arg-type]

    def leave(self) -> None:
        """Handles a client disconnect: wakes `receive`, and calls `on_leave`."""
        self.disconnected = True
        self.set()
        if self.on_leave:
            self.on_leave()

    def set(self) -> None:
        """Wakes `receive`: bytes were received, the client disconnected, or the answer is complete."""
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
        # Without a "100 Continue", the client may send its body or not, so the connection cannot be reused.
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
        # Written by `_continue`, together with the first part of the body.
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
    """Returns the percent-decoded path, and the path with the query as in the request line."""
    if url.startswith(b"/"):
        raw_path, _, query = url.partition(b"#")[0].partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query
    path = raw_path.decode("ascii")
    target = b"%b?%b" % (raw_path, query) if query else raw_path
    return unquote(path) if "%" in path else path, target
