"""The limits of a connection that uvicorn does not have. A file of its own, since its base class imports uvicorn."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reward_loop._util.web_server import KEEP_ALIVE_S

__all__ = ["MAX_HEAD_BYTES", "LimitedHttp"]

MAX_HEAD_BYTES = 64 * 1024
"""The longest head of a request, in bytes; longer ones get 400."""


_SILENT_S = 5.0
"""When most file descriptors are in use, connections without a complete request for longer make room for others, in
seconds."""


class LimitedHttp(HttpToolsProtocol):
    """A connection of uvicorn that closes if a request is not complete within `KEEP_ALIVE_S`, or an answer not read.

    uvicorn itself closes only connections that are idle after an answer: a client that sends nothing, or half a
    request, or does not read, would keep its connection, and the file descriptor, without ever needing the API key. The
    head, the trailer and the extensions of chunks are bounded; trailers are ignored, where uvicorn adds them to the
    headers.
    """

    _timer: asyncio.TimerHandle | None = None
    """Closes the connection. It runs from the first byte of a request, or the beginning of the connection, until the
    request is complete."""
    _in_head = True
    """Whether the head of a request is incomplete, or has not begun."""
    _unproductive_bytes = 0
    """The number of bytes received since the last complete head, part of a body, or complete request."""
    _unread: asyncio.TimerHandle | None = None
    """Closes the connection while its client does not read."""
    _silent_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()
        self._silent_since = self.loop.time()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files > 0 and 4 * len(self.connections) > 3 * files:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has been without a complete request for longest."""
        silent = [one for one in self.connections if isinstance(one, LimitedHttp) and one.is_silent]
        oldest = min(silent, key=lambda one: one._silent_since, default=None)
        if oldest is not None and self.loop.time() - oldest._silent_since > _SILENT_S:
            # Not `close`, which first waits until the client has read what is buffered. The timers below abort for the
            # same reason.
            oldest.transport.abort()

    @property
    def is_silent(self) -> bool:
        """Whether the connection has no complete request."""
        return self._timer is not None or self.timeout_keep_alive_task is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread:
            self._unread.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(KEEP_ALIVE_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread:
            self._unread.cancel()
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._silent_since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():  # the client has not read the answer
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # The connection is idle; uvicorn stops its own timer now.
            self._start_timer()
        self._unproductive_bytes += len(data)
        super().data_received(data)
        # A head that is complete is measured in `on_headers_complete`.
        if self._unproductive_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if self._in_head:
                self.send_400_response("The head of the request is too long.")
            else:  # its answer may have begun
                self.transport.abort()

    # httptools calls these.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # This request may have arrived with the end of the one before.
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        # 4 bytes of each header are its colon, its space and the end of its line.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head of the request is too long")  # uvicorn answers with 400
        self._in_head, self._unproductive_bytes = False, 0
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unproductive_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._unproductive_bytes = True, 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(KEEP_ALIVE_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
