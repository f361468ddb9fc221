"""The messages between a limiter service and its clients, over TCP or a local socket.

Lines of JSON, each a list of messages, in both directions. The service first sends a nonce; the client answers with the
name of its grant and a proof that it has the grant's token, without sending the token. The grant is that of a whole
job, or of one call of a function in a process of its own. When a connection ends, its permits end too; requests and
tokens that they counted stay counted.

    client                                          service
    ["enter", id, name, tokens, traffic_class]      ["grant", id] or ["refuse", id, why]
    ["used", id, tokens]
    ["leave", id, accepted, retry_after]
    ["spend", cost, tokens]                         ["spent", why], to all
    ["close"]                                       ends the connection, after everything before it is processed

    of a whole job only:
    ["count", failed, error, of]                    ["stop", why], to all
    ["configure", id, name, changes]                ["answer", id, why not, or null]; ["limits", max_waits], to all
    ["status", id]                                  ["answer", id, status]

    of one call only:
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
"""Seconds within which a client must reach the service. After that, the run stops."""

MAX_LINE = 2**24
"""Greatest length of a line, in bytes."""

JOB = "job"
"""The grant of a whole job."""

PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
"""The kernel probes a silent peer after these seconds, this often, before the connection counts as ended."""


class Messages:
    """Messages to a peer: those of one turn of the event loop leave together. They wait for `writer`."""

    def __init__(self, writer: asyncio.StreamWriter | None = None) -> None:
        self.writer = writer
        self._messages: list[bytes] = []

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """Send what was waiting, and all further messages."""
        self.writer = writer
        if self._messages:
            self._flush()

    def send(self, *message: Any) -> None:
        """Send a message.

        Raises:
            TypeError: JSON cannot hold the message; the other messages are not affected.
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
    """Return the line of some messages."""
    return orjson.dumps(messages) + b"\n"


def decode(line: bytes) -> list[list[Any]]:
    """Return the messages of a line.

    Raises:
        ValueError: the line is not JSON.
    """
    messages: list[list[Any]] = orjson.loads(line)
    return messages


def hello(grant: str, token: str, nonce: bytes) -> bytes:
    """Return the first line of a client: the grant's name, and the proof that the client has its token."""
    proof = hmac.new(token.encode(), nonce.strip(), hashlib.sha256).hexdigest()
    return f"{grant} {proof}\n".encode()


def notice_death(writer: asyncio.StreamWriter) -> None:
    """End a TCP connection within about a minute after the peer's node is gone, which does not close it."""
    connection = writer.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # The kernel sends no probes while sent data is not acknowledged; this is the same bound for that case.
    timeout_ms = (PROBE_AFTER_S + PROBE_EVERY_S * PROBES) * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
