"""The limits of a connection that uvicorn does not have. A file of its own, since its base class imports uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reward_loop._util.web_server import KEEP_ALIVE_S

__all__ = ["LimitedHttp"]

_MAX_HEAD_BYTES = 64 * 1024
"""The longest head of a request, in bytes; longer ones get 400."""


class LimitedHttp(HttpToolsProtocol):
    """A connection of uvicorn that closes if a request is not complete within `KEEP_ALIVE_S`.

    uvicorn itself closes only connections that are idle after an answer: a client that sends nothing, or half a
    request, would keep its connection, and the file descriptor, without ever needing the API key.
    """

    _timer: asyncio.TimerHandle | None = None
    """Closes the connection. It runs from the first byte of a request, or the beginning of the connection, until the
    request is complete."""
    _head_bytes: int | None = 0
    """The number of bytes received for the head of a request; ``None`` after its end."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:  # The connection is idle; uvicorn stops its own timer now.
            self._start_timer()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if (self._head_bytes or 0) > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    # httptools calls these.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # This request may have arrived with the end of the one before.
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._head_bytes = 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(KEEP_ALIVE_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
