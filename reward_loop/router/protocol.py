"""uvicorn's HTTP protocol, with a bound on the length of a request's head, and with less to do for each request.

uvicorn collects a head for as long as one comes, and writes the head and the body of an answer with a system call each.
What is left out here are access logs, WebSockets, a root path, and the check of header names and values: they come from
httptools, which has checked them, or from the control plane.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from reward_loop.router.refusal import Refusal

__all__ = ["protocol_for"]

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_ASGI = {"version": "3.0", "spec_version": "2.3"}

_NO_BODY = frozenset({204, 304})


def protocol_for(max_head_bytes: int) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn that refuses longer heads with 431."""
    return type("Protocol", (_Protocol,), {"max_head_bytes": max_head_bytes})


class _Protocol(HttpToolsProtocol):
    max_head_bytes = 0
    _in_head = True
    _head_bytes = 0
    cycle: Any

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        # What has come may have ended the head; then the rest is the body's.
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        parser = self.parser
        url = httptools.parse_url(self.url)
        raw_path = url.path
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": self.app_state,
        }
        self.scope = scope  # type: ignore[assignment]
        before = self.cycle
        self.cycle = cycle = _Cycle(self, version != "1.0" and parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
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
        # The first bytes of the next head come before its beginning is parsed.
        self._in_head = True
        super().on_message_complete()

    def _refuse_head(self) -> None:
        refusal = Refusal(431, f"the head of the request is longer than {self.max_head_bytes} bytes", close=True)
        headers, body = refusal.render()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (_STATUS_LINES[431], lines, body))
        self.transport.close()


class _Cycle(RequestResponseCycle):
    """One request and its answer. It is its own `message_event`."""

    def __init__(self, protocol: _Protocol, keep_alive: bool) -> None:
        self.scope = protocol.scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.on_response = protocol.on_response_complete
        self.message_event = self  # type: ignore[assignment]
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.body = b""  # type: ignore[assignment]
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding = False
        self.expected_content_length = 0
        self._head = b""
        self._news = False
        self._waiter: asyncio.Future[None] | None = None

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
        body, self.body = self.body, b""  # type: ignore[assignment]
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
        self.waiting_for_100_continue = False
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length = None
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
        if self.scope["method"] == "HEAD" or status in _NO_BODY:
            pass
        elif length is None:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.expected_content_length = length
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        # It waits for the body, of which the first part is written together with it.
        self._head = b"".join(lines)

    def _continue(self, body: bytes, more: bool) -> None:
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
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
            self.response_complete = True
            self.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
