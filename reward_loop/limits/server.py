"""The job's state in one place, for all its workers: a small TCP service."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, LimitError, RewardLoopError, TooManyFailuresError
from reward_loop.limits.limiter import PERIOD_S, Ticket
from reward_loop.limits.local import JobState
from reward_loop.limits.protocol import CONNECT_TIMEOUT_S, MAX_LINE, Lines, notice_death, proof

__all__ = ["JobService", "serve_job"]

GREETING_TIMEOUT_S = 10.0
"""Seconds within which a client must have proved that it knows the token."""


class JobService:
    """Keeps a `JobState` for clients. `start` it in a running loop, and `stop` it there.

    Args:
        options: the limits, the budget and the bound on failures.
        period: seconds over which requests and tokens are counted; a minute, but for tests.
    """

    def __init__(self, options: RewardLoopConfig, period: float = PERIOD_S) -> None:
        self.state = JobState(options, period)
        self._token = secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None
        self._clients: dict[_Client, asyncio.Task[None]] = {}

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen. Return what clients connect by: ``host:port:token``."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE)
        port = self._server.sockets[0].getsockname()[1]
        return f"{host}:{port}:{self._token}"

    async def stop(self) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._clients.values():
            task.cancel()
        await asyncio.gather(*self._clients.values(), return_exceptions=True)
        await self._server.wait_closed()

    def tell_all(self, *message: Any) -> None:
        """Send a message to all clients."""
        for client in self._clients:
            client.lines.send(*message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, Lines(writer))
        try:
            notice_death(writer)
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                nonce = secrets.token_hex(16)
                writer.write(nonce.encode() + b"\n")
                answer = (await reader.readline()).decode().strip()
                if not hmac.compare_digest(answer, proof(self._token, nonce)):
                    writer.write(b"\n")
                    return
            task = asyncio.current_task()
            assert task is not None
            self._clients[client] = task
            client.greet()
            async for line in reader:
                for message in orjson.loads(line):
                    client.receive(*message)
        except (OSError, TimeoutError, ValueError, asyncio.CancelledError):
            pass  # The connection is of no more use, whatever ended it.
        finally:
            self._clients.pop(client, None)
            client.gone()
            writer.close()


class _Client:
    """One connection, seen from the service."""

    def __init__(self, service: JobService, lines: Lines) -> None:
        self._service = service
        self._state = service.state
        self.lines = lines
        self._calls: dict[int, tuple[str, Ticket]] = {}

    def greet(self) -> None:
        self.lines.send("limited", self._state.max_waits)
        if self._state.spent:
            self.lines.send("spent", self._state.spent)
        if self._state.stopped:
            self.lines.send("stop", self._state.stopped)

    def receive(self, what: str, *rest: Any) -> None:
        handlers: dict[str, Callable[..., None]] = {
            "enter": self._enter,
            "used": self._used,
            "leave": self._leave,
            "spend": self._spend,
            "count": self._count,
            "configure": self._configure,
            "status": self._status,
        }
        handlers[what](*rest)

    def gone(self) -> None:
        for name, ticket in self._calls.values():
            self._state.leave(name, ticket, False, None)
        self._calls.clear()

    def _enter(self, call: int, name: str, tokens: float, share: str) -> None:
        ticket = _There(self.lines, call, tokens, share)
        self._calls[call] = (name, ticket)
        try:
            self._state.queue(name, ticket)
        except LimitError as error:
            self._calls.pop(call, None)
            self.lines.send("refuse", call, str(error))

    def _used(self, call: int, tokens: float) -> None:
        if call in self._calls:
            name, ticket = self._calls[call]
            self._state.correct(name, ticket, tokens)

    def _leave(self, call: int, refused: bool, retry_after: float | None) -> None:
        if call in self._calls:
            name, ticket = self._calls.pop(call)
            self._state.leave(name, ticket, refused, retry_after)

    def _spend(self, cost: float, tokens: float) -> None:
        before = self._state.spent
        self._state.spend(cost, tokens)
        if self._state.spent != before:
            self._service.tell_all("spent", self._state.spent)

    def _count(self, failed: bool, error: str | None, of: str) -> None:
        try:
            self._state.count(failed, error, of)
        except TooManyFailuresError as stop:
            self._service.tell_all("stop", str(stop))

    def _configure(self, request: int, name: str, changes: dict[str, Any]) -> None:
        try:
            self._state.configure(name, changes)
        except ConfigError as error:
            self.lines.send("answer", request, str(error))
            return
        self.lines.send("answer", request, None)
        self._service.tell_all("limited", self._state.max_waits)

    def _status(self, request: int) -> None:
        self.lines.send("answer", request, self._state.status())


class _There(Ticket):
    """The place of a call in a client's process."""

    __slots__ = ("_call", "_lines")

    def __init__(self, lines: Lines, call: int, tokens: float, share: str) -> None:
        super().__init__(tokens, share)
        self._lines = lines
        self._call = call

    def admit(self) -> None:
        self._lines.send("admit", self._call)

    def refuse(self, error: LimitError) -> None:
        self._lines.send("refuse", self._call, str(error))


@contextlib.contextmanager
def serve_job(options: RewardLoopConfig, host: str = "127.0.0.1", period: float = PERIOD_S) -> Iterator[str]:
    """Keep a job's state in a thread of this process, for as long as the context lasts.

    Args:
        options: the limits, the budget and the bound on failures.
        host: the address to listen on. Other nodes reach a job by an address of this one.
        period: seconds over which requests and tokens are counted; a minute, but for tests.

    Yields:
        ``host:port:token``, for ``reward_loop.job`` of the workers.

    Raises:
        RewardLoopError: it cannot listen there.
    """
    ready = _Ready()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(options, host, period, ready)), name="job-service", daemon=True
    )
    thread.start()
    address, stop = ready.wait()
    try:
        yield address
    finally:
        stop()
        thread.join()


class _Ready:
    """How the thread of a service says that it listens, or why it cannot."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._outcome: Any = None

    def set(self, outcome: Any) -> None:
        self._outcome = outcome
        self._event.set()

    def wait(self) -> Any:
        self._event.wait(CONNECT_TIMEOUT_S)
        if not isinstance(self._outcome, tuple):
            raise RewardLoopError(f"the service of the job cannot listen: {self._outcome}")
        return self._outcome


async def _serve(options: RewardLoopConfig, host: str, period: float, ready: _Ready) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    service = JobService(options, period)
    try:
        address = await service.start(host)
    except OSError as error:
        ready.set(error)
        return
    ready.set((address, lambda: loop.call_soon_threadsafe(stopped.set)))
    await stopped.wait()
    await service.stop()
