"""The messages between a limiter service and its clients. Each frame is a JSON list of messages.

A worker of the job connects over TCP. The service sends a nonce, and the worker replies with an HMAC of the nonce under
the job's token, so the token itself is never sent. If the proof is invalid, the service replies with an empty frame and
closes the connection.

When a connection ends, its permits end too; requests and tokens stay counted.

    client                                          service
    ["request", id, name, tokens, order]            ["settled", id, null, or error type and message]
    ["used", id, tokens]
    ["leave", id, accepted, retry_after]
    ["spend", cost, tokens]                         ["spent", why] to all clients, if the budget is now used up
    (after authentication)                          ["limits", max_waits]; also ["spent", why], ["stop", why] if set
    ["count", failed, error, cause, of]             ["stop", why] to all clients, if the run must stop
    ["status", id]                                  ["answer", id, status]
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from typing import Any

import orjson

from reward_loop._util.framing import frame, read_frame
from reward_loop.errors import BudgetSpentError, JobServiceError, LimitError

MAX_LENGTH = 2**24
"""Maximum length of a frame in bytes."""

PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
"""TCP keepalive: seconds of silence before the first probe, seconds between probes, and failed probes until the
connection is closed."""

_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (LimitError, BudgetSpentError, JobServiceError)}


class MessageQueue:
    """The queue of messages to a peer: holds them until `connect`, then sends those of one loop iteration together."""

    def __init__(self, writer: asyncio.StreamWriter | None = None) -> None:
        self.writer = writer
        self._messages: list[bytes] = []

    @property
    def is_connected(self) -> bool:
        """Whether messages are sent now."""
        return self.writer is not None and not self.writer.is_closing()

    def connect(self, writer: asyncio.StreamWriter) -> None:
        """Set the connection, and send all queued messages."""
        self.writer = writer
        if self._messages:
            self._flush()

    def send(self, *message: Any) -> None:
        """Queue a message for sending.

        Raises:
            TypeError: the message cannot be serialised to JSON; other messages are not affected.
        """
        # Encoded here, and not with the others in `_flush`: so the error is that of this message alone.
        encoded = orjson.dumps(message)
        if not self._messages and self.writer is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(encoded)

    def _flush(self) -> None:
        assert self.writer is not None
        if not self.writer.is_closing():
            start = size = 0
            for i, message in enumerate(self._messages):
                size += len(message) + 1
                # The peer ends the connection when it gets a longer frame.
                if size >= MAX_LENGTH:
                    self._write(self._messages[start:i])
                    start, size = i, len(message) + 1
            self._write(self._messages[start:])
        self._messages.clear()

    def _write(self, messages: list[bytes]) -> None:
        assert self.writer is not None
        self.writer.write(frame(b"[", b",".join(messages), b"]"))


def encode(*messages: tuple[Any, ...]) -> bytes:
    """Return the frame of the messages."""
    return frame(orjson.dumps(messages))


def decode(content: bytes) -> list[list[Any]]:
    """Return the messages in the content of a frame; raises `ValueError` if it is not JSON."""
    messages: list[list[Any]] = orjson.loads(content)
    return messages


async def receive(reader: asyncio.StreamReader) -> list[list[Any]]:
    """Wait for a frame, and return its messages.

    Raises:
        EOFError: the connection has ended.
        OSError: the connection failed.
        ValueError: the frame is too long, or is not JSON.
    """
    return decode(await read_frame(reader, MAX_LENGTH))


def refusal(kind: str, why: str) -> Exception:
    """Return the error of a permit from the message ``settled``."""
    return _ERRORS.get(kind, LimitError)(why)


def proof(token: str, nonce: bytes) -> bytes:
    """Return the HMAC of the nonce under the token, with which a worker authenticates."""
    return hmac.digest(token.encode(), nonce, hashlib.sha256)


def enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive: the connection ends about a minute after the peer's node dies without closing it."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # The kernel sends no probes while sent data is unacknowledged; this sets the same timeout for that case.
    timeout_ms = (PROBE_AFTER_S + PROBE_EVERY_S * PROBES) * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
