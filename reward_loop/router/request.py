"""One request of a client's: how long it may take, whether the client is still there, and how far its answer is."""

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
"""A request that takes longer than this is given up when its client leaves; quicker ones are not worth the watching."""


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """One request.

    Args:
        scope, receive, send: of ASGI.
        timeout_s: seconds until it is broken off with what `late` gives.
        late: the refusal of a request that took too long.
        arrived: when it came, in the loop's time; by default, now.
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
        """Whether an answer has begun."""
        self.waits_for: str | None = None
        """The URL of the server that has it."""
        self.reading = False
        """Whether its body is still to come."""
        self.broken_off: Exception | None = None
        """Why its task was cancelled."""
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
        """For messages."""
        return f"{self.scope['method']} {self.scope['path']}"

    @property
    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - self._loop.time()

    def set_timer(self) -> None:
        """From now on the deadline holds."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._end_late)

    def end(self) -> None:
        """The request is done with."""
        if self._timer:
            self._timer.cancel()
        if self._watch:
            self._watch.cancel()
        self._task = None

    async def read_body(self, limit: int) -> bytes:
        """The whole body.

        Raises:
            ClientLeftError: the client left before its end.
            Refusal: it is longer than the limit.
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
        """Sends a server's answer to the client, part by part as it comes.

        Raises:
            BrokenError: it broke off.
        """
        headers = answer.headers
        if answer.status in NO_BODY:
            # The length of what a GET would have brought: uvicorn would wait for it.
            headers = [header for header in headers if header[0] != b"content-length"]
        elif not answer.complete and self.scope["http_version"] == "1.0" and answer.length is None:
            # The client knows no chunks: it gets the whole at once.
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
        # The protocol writes the head together with the first part of the body; here that may be long in coming.
        await self._send({"type": "http.response.body", "body": answer.take(), "more_body": True})
        try:
            while part := await answer.read():
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            answer.close()
        await self._send({"type": "http.response.body", "body": b""})
        return None

    async def refuse(self, refusal: Refusal) -> None:
        """Answers with an error of the router's own, unless an answer has begun; that one just breaks off."""
        if not self.started:
            await self.answer(refusal.status, *refusal.render())

    async def answer(self, status: int, headers: list[RawHeader], body: bytes) -> None:
        """Sends a whole answer."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def check(self, now: float) -> None:
        """Ends it if it is late, and from some time on, if its client leaves."""
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
