"""How the workers of a job, in several processes and on several nodes, talk to its service: over TCP.

Lines of JSON, each a list of messages, go both ways; what is said in one turn of a loop shares a line. A client first
proves that it knows the job's token, without sending it. When a client's connection ends, its calls in flight and in
the queues are gone; what they counted for in the current minute stays counted.

    client                                          service
    ["enter", id, name, tokens, share]              ["admit", id] or ["refuse", id, why]
    ["used", id, tokens]
    ["leave", id, refused, retry_after]
    ["spend", cost, tokens]                         ["spent", why], to all
    ["count", failed, error, of]                    ["stop", why], to all
    ["configure", id, name, changes]                ["answer", id, why not, or null]; ["limited", limits], to all
    ["status", id]                                  ["answer", id, status]
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from typing import Any

import orjson

__all__ = ["CONNECT_TIMEOUT_S", "MAX_LINE", "Lines", "notice_death", "proof"]

CONNECT_TIMEOUT_S = 30.0
"""Seconds within which a worker must reach the service; after that its calls are not made, and the run stops."""

MAX_LINE = 2**24
"""Bytes of a line, at most."""


PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
"""A peer that is silent for so long is probed by the kernel, so often, before its connection counts as ended."""


class Lines:
    """Messages that leave together, at the end of a turn of the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._messages: list[bytes] = []

    def send(self, *message: Any) -> None:
        """Send a message; one that JSON has no place for is an error here, and no other message's trouble."""
        encoded = orjson.dumps(message)
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(encoded)

    def _flush(self) -> None:
        if not self._writer.is_closing():
            self._writer.write(b"[" + b",".join(self._messages) + b"]\n")
        self._messages.clear()


def notice_death(writer: asyncio.StreamWriter) -> None:
    """Have a connection end within about a minute where the peer's node is gone, which does not close it."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # The same where something was sent that is not acknowledged: there are no probes then.
    patience_ms = (PROBE_AFTER_S + PROBE_EVERY_S * PROBES) * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)


def proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()
