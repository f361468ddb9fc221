"""One request of a client: its deadline, client disconnects, its body, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from reward_loop.router.headers import RawHeader
from reward_loop.router.http_client import NO_BODY, Answer
from reward_loop.router.router_error import Refusal

__all__ = ["WATCH_AFTER_S", "ClientLeftError", "Exchange", "Receive", "Scope", "Send"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

WATCH_AFTER_S = 0.25
"""Client disconnects are detected only in requests that take longer than this, in seconds; detection needs a task."""


class ClientLeftError(Exception):
    """The client disconnected before it received the answer."""


class Exchange:
    """One request that is served in a task.

    At the deadline, or when the client disconnects, it sets `broken_off` and cancels the task. Create it in that task.

    Args:
        scope, receive, send: the arguments of the ASGI app.
        timeout_s: seconds from `arrived` until the deadline.
        late: returns the error for a request that has passed its deadline.
        arrived: when the request arrived, in seconds of the event loop's clock; by default, now.
    """

    __slots__ = (
        "_deadline",
        "_late",
        "_loop",
        "_receive",
        "_send",
        "_task",
        "_timer",
        "_watch",
        "arrived",
        "broken_off",
        "reading",
        "scope",
        "started",
        "waits_for",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        timeout_s: float,
        late: Callable[[Exchange], Refusal],
        arrived: float | None = None,
    ) -> None:
        self.scope = scope
        self.started = False
        """Whether the answer to the client has begun."""
        self.waits_for: str | None = None
        """The URL of the server that the request was sent to, while it waits for the answer."""
        self.reading = False
        """Whether the request's body is being received."""
        self.broken_off: Exception | None = None
        """The reason why the task was cancelled: a `Refusal` or a `ClientLeftError`."""
        self._receive = receive
        self._send = send
        self._late = late
        self._loop = loop = asyncio.get_running_loop()
        self.arrived = loop.time() if arrived is None else arrived
        self._deadline = self.arrived + timeout_s
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The method and the path, for messages."""
        return f"{self.scope['method']} {self.scope['path']}"

    @property
    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self._loop.time()

    def set_timer(self) -> None:
        """Starts the timer of the deadline, if it is not running."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._end_late)

    def end(self) -> None:
        """Stops the timer and the detection of disconnects, after the request has ended."""
        if self._timer:
            self._timer.cancel()
        if self._watch:
            self._watch.cancel()
        self._task = None

    async def read_body(self, limit: int) -> bytes:
        """Reads and returns the whole body.

        Args:
            limit: the longest body, in bytes.

        Raises:
            ClientLeftError: the client disconnected before the end of the body.
            Refusal: the body is longer than the limit.
        """
        self.set_timer()
        self.reading = True
        parts: list[bytes] = []
        length = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > limit:
                raise Refusal(413, f"the body is longer than {limit} bytes", close=True)
            if not message.get("more_body"):
                self.reading = False
                return b"".join(parts)

    async def pass_on(self, answer: Answer) -> None:
        """Sends a server's answer to the client; streams the body if it is not complete yet.

        Raises:
            BrokenError: the connection to the server broke before the end of the answer.
        """
        headers = answer.headers
        if answer.status in NO_BODY:
            # A 304 may have the Content-Length of the answer to a GET: uvicorn would wait for that body.
            headers = [header for header in headers if header[0] != b"content-length"]
        elif not answer.complete and self.scope["http_version"] == "1.0" and answer.length is None:
            # HTTP/1.0 has no chunked encoding: send the whole body at once, with its length.
            parts = []
            while part := await answer.read():
                parts.append(part)
            body = b"".join(parts)
            length = (b"content-length", b"%d" % len(body))
            return await self.answer(answer.status, [*headers, length], body)
        if answer.complete:
            return await self.answer(answer.status, headers, answer.take())
        self.started = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        # The protocol writes the head together with the first part of the body, which may take long to arrive: send an
        # empty first part, so that the client receives the head at once.
        await self._send({"type": "http.response.body", "body": answer.take(), "more_body": True})
        try:
            while part := await answer.read():
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            answer.close()
        await self._send({"type": "http.response.body", "body": b""})
        return None

    async def refuse(self, refusal: Refusal) -> None:
        """Sends an error answer, unless an answer has begun."""
        if not self.started:
            await self.answer(refusal.status, *refusal.render())

    async def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends a complete answer; `headers` include ``Content-Length``."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def check(self, now: float) -> None:
        """Cancels the request if its deadline has passed; after `WATCH_AFTER_S`, starts to detect a disconnect."""
        if now >= self._deadline:
            self._end_late()
        elif self._watch is None and now >= self.arrived + WATCH_AFTER_S:
            self._watch = self._loop.create_task(self._watch_client())

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._break_off(ClientLeftError())

    def _end_late(self) -> None:
        self._break_off(self._late(self))

    def _break_off(self, reason: Exception) -> None:
        if self._task and self.broken_off is None:
            self.broken_off = reason
            self._task.cancel()
