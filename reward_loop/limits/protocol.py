"""The messages between a limiter service and its clients, over TCP or a local socket.

Both sides send lines of JSON; each line is a list of messages. To authenticate, the service sends a nonce, and the
client replies with the name of its grant and an HMAC of the nonce under the grant's token. The token itself is never
sent. A grant is for a whole job, or for one call of a function in a worker process. When a connection ends, its permits
end too; their requests and tokens stay counted.

    client                                          service
    ["enter", id, name, tokens, traffic_class]      ["grant", id] or ["refuse", id, error type, message]
    ["used", id, tokens]
    ["leave", id, accepted, retry_after]
    ["spend", cost, tokens]                         ["spent", why] to all clients, if the budget is now used up
    ["close"]                                       processes all earlier messages, then closes the connection

    grant of a whole job only:
    (after authentication)                          ["limits", max_waits]; also ["spent", why], ["stop", why] if set
    ["count", failed, error, of]                    ["stop", why] to all clients, if the run must stop
    ["configure", id, name, changes]                ["answer", id, error or null]; ["limits", max_waits] to all clients
    ["status", id]                                  ["answer", id, status]

    grant of one call only:
    ["answer", accepted, retry_after]
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from typing import Any

import orjson

__all__ = ["CONNECT_TIMEOUT_S", "JOB", "MAX_LINE", "Messages", "decode", "encode", "hello", "notice_death"]

CONNECT_TIMEOUT_S = 30.0
"""Seconds for a client to connect to the service, or to get a response. After that, the run stops."""

MAX_LINE = 2**24
"""Maximum length of a line in bytes."""

JOB = "job"
"""The name of the grant of a whole job."""

PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
"""TCP keepalive: seconds of silence before the first probe, seconds between probes, and failed probes until the
connection is closed."""


class Messages:
    """The queue of messages to a peer. Messages of one event loop iteration are sent together.

    Without a `writer`, messages are queued until `connect`.
    """

    def __init__(self, writer: asyncio.StreamWriter | None = None) -> None:
        self.writer = writer
        self._messages: list[bytes] = []

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """Set the writer, and send all queued messages."""
        self.writer = writer
        if self._messages:
            self._flush()

    def send(self, *message: Any) -> None:
        """Queue a message for sending.

        Raises:
            TypeError: the message cannot be serialised to JSON; other messages are not affected.
        """
        encoded = orjson.dumps(message)
        if not self._messages and self.writer is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(encoded)

    def _flush(self) -> None:
        assert self.writer is not None
        if not self.writer.is_closing():
            self.writer.write(b"[" + b",".join(self._messages) + b"]\n")
        self._messages.clear()


def encode(*messages: tuple[Any, ...]) -> bytes:
    """Return messages serialised as one line."""
    return orjson.dumps(messages) + b"\n"


def decode(line: bytes) -> list[list[Any]]:
    """Return the messages in a line.

    Raises:
        ValueError: the line is not JSON.
    """
    messages: list[list[Any]] = orjson.loads(line)
    return messages


def hello(grant: str, token: str, nonce: bytes) -> bytes:
    """Return the first line that a client sends: the name of its grant, and the HMAC of the nonce under its token."""
    proof = hmac.new(token.encode(), nonce.strip(), hashlib.sha256).hexdigest()
    return f"{grant} {proof}\n".encode()


def notice_death(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive: the connection ends about a minute after the peer's node dies without closing it."""
    connection = writer.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # The kernel sends no probes while sent data is unacknowledged; this sets the same timeout for that case.
    timeout_ms = (PROBE_AFTER_S + PROBE_EVERY_S * PROBES) * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
