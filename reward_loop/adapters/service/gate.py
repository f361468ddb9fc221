"""Checks the API key of each request, bounds its body, and counts its answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reward_loop.adapters.service.metrics import Metrics

__all__ = ["Gate"]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for health checks, which need no key."""

BODY_S = 60.0
"""Seconds within which a client must send the body."""


class Gate:
    """An ASGI middleware: it answers requests without the key with 401, and those with too long a body with 413.

    The key is a bearer token, or the password in the URL (HTTP Basic, with any user name): many trainers send requests
    to a URL without headers of their own.

    Args:
        app: the app.
        key: the key; ``None`` if none is needed.
        max_body_bytes: the longest body.
        metrics: counts the answers.
        paths: the paths of the app, for the metrics.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, max_body_bytes: int, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.request(path, message["status"], time.perf_counter() - started)
            await send(message)

        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS and not self._is_allowed(headers.get("authorization", "")):
            answer = _error(
                401,
                "the API key is missing or wrong: send it as a bearer token, or in the URL as "
                "http://key:KEY@host:port/path",
            )
            answer.headers["www-authenticate"] = 'Basic realm="reward-loop serve"'
            await answer(scope, receive, counted)
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._read(headers, receive)
        except TimeoutError:
            await _error(408, f"the body did not arrive within {BODY_S:g} s")(scope, receive, counted)
            return
        except _TooLongError:
            message = (
                f"the body is longer than {self._max_body_bytes} bytes: send fewer samples, or raise --max-body-mb"
            )
            await _error(413, message)(scope, receive, counted)
            return
        if body is None:
            return
        unread = [body]

        async def replay() -> Message:
            return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

        await self._app(scope, replay, counted)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; ``None`` if the client disconnected before its end."""
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise _TooLongError
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise _TooLongError
            more = message.get("more_body", False)
        return b"".join(parts)

    def _is_allowed(self, header: str) -> bool:
        if self._key is None:
            return True
        scheme, _, credentials = header.partition(" ")
        given = credentials.strip().encode("latin-1")  # as Starlette decodes headers
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given, self._key)


class _TooLongError(Exception):
    """The body of a request is longer than the limit."""


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)
