"""The limiter service: gives other processes access to the limits kept in this process."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from reward_loop._util.event_loops import in_background
from reward_loop._util.framing import frame, read_frame
from reward_loop.errors import RewardLoopError, TooManyFailuresError
from reward_loop.limits.limiter import PERIOD_S
from reward_loop.limits.local import FailureBound, LocalLimits
from reward_loop.limits.options import JobOptions
from reward_loop.limits.permit import PeerPermits
from reward_loop.limits.protocol import MessageQueue, enable_keepalive, proof, receive

_AUTHENTICATION_TIMEOUT_S = 10.0
"""Seconds for a client to authenticate."""


class LimitServer:
    """Serves the limits of a job over TCP: they and its failed samples are those of all workers.

    Call `start` and `stop` on one event loop.
    """

    def __init__(self, options: JobOptions, period: float = PERIOD_S) -> None:
        self.limits = LocalLimits(options, period)
        self.limits.on_change = self._send_to_all
        # A text without a colon, which separates the parts of the address.
        self.token = secrets.token_urlsafe(24)
        self.stopped: str | None = None
        """Why the run must stop, once too many samples have failed."""
        self._failures: dict[str, FailureBound] = {}
        self._server: asyncio.Server | None = None
        self._connections: dict[MessageQueue, asyncio.Task[Any]] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Start listening, by default on any free port; return the address for clients, ``host:port:token``.

        Raises:
            RewardLoopError: the address cannot be bound.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise RewardLoopError(f"the limiter service cannot listen on {host}: {error}") from error
        port = self._server.sockets[0].getsockname()[1]
        self.limits.name = f"{host}:{port}"
        return f"{host}:{port}:{self.token}"

    async def stop(self) -> None:
        """Stop listening, close all connections, and close the limits."""
        assert self._server is not None
        self._server.close()
        # In this order: since Python 3.12, `wait_closed` waits for the end of all connections.
        await self.disconnect()
        await self._server.wait_closed()
        self.limits.close()

    async def disconnect(self) -> None:
        """Close all current connections; clients may reconnect."""
        tasks = list(self._connections.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Errors of the connection and of the protocol, and the cancellation by `disconnect`, end this connection only.
        ended = contextlib.suppress(OSError, EOFError, ValueError, asyncio.CancelledError)  # TimeoutError is an OSError
        with ended, contextlib.closing(writer):
            if not await self._authenticate(reader, writer):
                return
            # Permits belong to the connection: a worker that dies, or whose node is lost, releases its permits with it.
            messages = MessageQueue(writer)
            permits, answer = PeerPermits(), partial(messages.send, "settled")
            # No handler waits: the messages of a connection take effect in the order in which they were sent.
            handlers: dict[str, Callable[..., None]] = {
                "request": lambda number, name, tokens, order: permits.request(
                    number, partial(self.limits.request, name, tokens, tuple(order)), answer
                ),
                "used": permits.used,
                "leave": permits.leave,
                "spend": self.limits.spend,
                "count": self._count,
                "status": lambda request: messages.send("answer", request, self.limits.snapshot()),
            }
            task = asyncio.current_task()
            assert task is not None
            self._connections[messages] = task
            try:
                # A client that connects late, or again, needs the state that the others got as messages.
                messages.send("limits", self.limits.max_waits)
                if self.limits.spent:
                    messages.send("spent", self.limits.spent)
                if self.stopped:
                    messages.send("stop", self.stopped)
                while True:
                    for what, *rest in await receive(reader):
                        handlers[what](*rest)
            finally:
                del self._connections[messages]
                permits.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        enable_keepalive(writer)
        nonce = secrets.token_bytes(16)
        expected = proof(self.token, nonce)
        writer.write(frame(nonce))
        async with asyncio.timeout(_AUTHENTICATION_TIMEOUT_S):
            # Bounded: without a proof, a peer must not make the service collect a long frame.
            answer = await read_frame(reader, max_length=len(expected))
        # Not ==, whose time depends on the number of equal bytes.
        valid = hmac.compare_digest(answer, expected)
        if not valid:
            writer.write(frame())
        return valid

    def _send_to_all(self, *message: Any) -> None:
        for messages in self._connections:
            messages.send(*message)

    def _count(self, failed: bool, error: str | None, cause: str | None, of: str) -> None:
        if of not in self._failures:
            self._failures[of] = FailureBound.of_options(self.limits.options, of)
        try:
            self._failures[of].add(failed, error, cause)
        except TooManyFailuresError as stop:
            # Not raised here, in the task of one connection: each worker raises it, and so ends the run.
            self.stopped = str(stop)
            self._send_to_all("stop", self.stopped)


@contextlib.contextmanager
def serve_limits(options: JobOptions, host: str = "127.0.0.1", period: float = PERIOD_S) -> Iterator[str]:
    """Run a limiter service for a job in a thread of this process, for the duration of the context.

    Args:
        options: the limits, the budget and the failure bound, such as a `RewardLoopConfig`.
        host: the address to listen on; for clients on other nodes, an address of this node that they can reach.
        period: seconds over which requests and tokens are counted; shorter than a minute only in tests.

    Yields:
        ``host:port:token``, the value of ``reward_loop.job`` for the workers.

    Raises:
        RewardLoopError: the service cannot listen on ``host``.

    Example::

        with serve_limits(options) as address:
            function = ScoringFunction(compute_score, options=RewardLoopConfig(job=address))
    """

    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[str]:
        server = LimitServer(options, period)
        address = await server.start(host)
        try:
            yield address
        finally:
            await server.stop()

    # On a loop of its own: code that blocks another loop of this process would stop the calls of all workers.
    with in_background(served, name="limiter-service") as address:
        yield address
