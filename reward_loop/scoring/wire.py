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
from typing import Any

import orjson

__all__ = ["CONNECT_TIMEOUT_S", "MAX_LINE", "Lines", "proof"]

CONNECT_TIMEOUT_S = 30.0
"""Seconds within which a worker must reach the service; after that its calls are not made, and the run stops."""

MAX_LINE = 2**24
"""Bytes of a line, at most."""


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


def proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()
