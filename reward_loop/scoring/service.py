"""The job's state in one place, for workers in several processes and on several nodes: a small TCP service.

Lines of JSON, each a list of messages, go both ways; what is said in one turn of a loop shares a line. A client first
proves that it knows the job's token, without sending it. When a client's connection ends, its calls in flight and in
the queues are gone; what they counted for in the current minute stays counted.

    client                                          service
    ["enter", id, name, tokens, share]              ["admit", id] or ["refuse", id, why]
    ["used", id, tokens]
    ["leave", id, refused, retry_after]
    ["spend", cost, tokens]                         ["spent", why], to all
    ["count", failed, error]                        ["stop", why], to all
    ["configure", id, name, changes]                ["answer", id, why not, or null]; ["limited", names], to all
    ["status", id]                                  ["answer", id, status]
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, JobServiceError, LimitError, RewardLoopError, TooManyFailuresError
from reward_loop.scoring.job import JobState, Place
from reward_loop.scoring.limiter import PERIOD_S, Ticket

__all__ = ["JobService", "RemoteJob", "serve_job"]

CONNECT_TIMEOUT_S = 30.0
"""Seconds within which a worker must reach the service; after that its calls are not made, and the run stops."""

GREETING_TIMEOUT_S = 10.0
"""Seconds within which a client must have proved that it knows the token."""

MAX_LINE = 2**24


class _Lines:
    """Messages that leave together, at the end of a turn of the loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._messages: list[list[Any]] = []

    def send(self, *message: Any) -> None:
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(list(message))

    def _flush(self) -> None:
        if not self._writer.is_closing():
            self._writer.write(orjson.dumps(self._messages) + b"\n")
        self._messages.clear()


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


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
        client = _Client(self, _Lines(writer))
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                nonce = secrets.token_hex(16)
                writer.write(nonce.encode() + b"\n")
                proof = (await reader.readline()).decode().strip()
                if not hmac.compare_digest(proof, _proof(self._token, nonce)):
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

    def __init__(self, service: JobService, lines: _Lines) -> None:
        self._service = service
        self._state = service.state
        self.lines = lines
        self._calls: dict[int, tuple[str, Ticket]] = {}

    def greet(self) -> None:
        self.lines.send("limited", sorted(self._state.limited))
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
        def take(ticket: Ticket) -> None:
            self._calls[call] = (name, ticket)

        try:
            self._state.queue(name, tokens, share, functools.partial(self.lines.send, "admit", call), take)
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

    def _count(self, failed: bool, error: str | None) -> None:
        try:
            self._state.count(failed, error)
        except TooManyFailuresError as stop:
            self._service.tell_all("stop", str(stop))

    def _configure(self, request: int, name: str, changes: dict[str, Any]) -> None:
        try:
            self._state.configure(name, changes)
        except ConfigError as error:
            self.lines.send("answer", request, str(error))
            return
        self.lines.send("answer", request, None)
        self._service.tell_all("limited", sorted(self._state.limited))

    def _status(self, request: int) -> None:
        self.lines.send("answer", request, self._state.status())


class RemoteJob:
    """A `Job` that a service keeps. Connects by itself, in the running loop.

    Args:
        address: ``host:port:token``, as `JobService.start` returns it.
        options: the limits, for their names and longest waits.
    """

    def __init__(self, address: str, options: RewardLoopConfig | None = None) -> None:
        try:
            host, port, token = address.rsplit(":", 2)
            self._address = host, int(port)
        except ValueError:
            raise ConfigError("reward_loop.job: expected host:port:token, as the service gives it") from None
        self._token = token
        self._options = options or RewardLoopConfig()
        self.limited = frozenset(self._options.limits)
        self.spent: str | None = None
        self.stopped: str | None = None
        self._lost: JobServiceError | None = None
        self._lines: _Lines | None = None
        self._connection: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[_Lines] | None = None
        self._ids = itertools.count()
        self._turns: dict[int, asyncio.Future[Any]] = {}

    async def enter(self, name: str, tokens: float, share: str) -> Place:
        """Wait for a place within a limit."""
        lines = await self._connect()
        call, turn = next(self._ids), asyncio.get_running_loop().create_future()
        place = _There(self, lines, call)
        config = self._options.limits.get(name)
        max_wait = config.max_wait if config else None
        self._turns[call] = turn
        lines.send("enter", call, name, tokens, share)
        try:
            async with asyncio.timeout(max_wait):
                await turn
        except TimeoutError:
            place.leave()
            raise LimitError(f"limit {name!r}: no place within max_wait={max_wait:g} s") from None
        except BaseException:
            place.leave()
            raise
        finally:
            self._turns.pop(call, None)
        return place

    def spend(self, cost: float, tokens: float) -> None:
        """Count what a call used."""
        self._send("spend", cost, tokens)

    def count(self, failed: bool, error: str | None) -> None:
        """Count one sample; what the service makes of it is raised at one of the next."""
        if self.stopped is not None:
            raise TooManyFailuresError(self.stopped)
        if self._lost is not None:
            raise self._lost
        self._send("count", failed, error)

    async def why_stopped(self) -> str | None:
        """Say why the run must stop, if it must; all that was counted here before is taken into account."""
        try:
            await self.status()
        except JobServiceError as error:
            return str(error)
        return None if self.stopped is None else f"TooManyFailuresError: {self.stopped}"

    async def configure(self, name: str, changes: dict[str, Any]) -> None:
        """Change some options of a limit, or add one, while the job runs.

        Raises:
            ConfigError: an option is wrong.
            JobServiceError: the service cannot be reached.
        """
        refusal = await self._ask("configure", name, changes)
        if refusal is not None:
            raise ConfigError(refusal)

    async def status(self) -> dict[str, Any]:
        """What there is in flight, waiting and used."""
        status: dict[str, Any] = await self._ask("status")
        return status

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.cancel()
            await asyncio.gather(self._connection, return_exceptions=True)

    async def _ask(self, question: str, *arguments: Any) -> Any:
        lines = await self._connect()
        request = next(self._ids)
        answer = self._turns[request] = asyncio.get_running_loop().create_future()
        lines.send(question, request, *arguments)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise self._unreachable("it does not answer") from None
        finally:
            self._turns.pop(request, None)

    def _send(self, *message: Any) -> None:
        if self._lines is not None:
            self._lines.send(*message)
            return

        def send(connected: asyncio.Future[_Lines]) -> None:
            if not connected.cancelled() and connected.exception() is None:
                connected.result().send(*message)

        self._open().add_done_callback(send)

    async def _connect(self) -> _Lines:
        if self._lines is not None:
            return self._lines
        return await asyncio.shield(self._open())

    def _open(self) -> asyncio.Future[_Lines]:
        if self._connected is None or (self._connected.done() and self._lines is None):
            self._connected = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._run(self._connected))
        return self._connected

    async def _run(self, connected: asyncio.Future[_Lines]) -> None:
        writer: asyncio.StreamWriter | None = None
        why = "it has gone"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address, limit=MAX_LINE)
                nonce = (await reader.readline()).decode().strip()
                writer.write(_proof(self._token, nonce).encode() + b"\n")
                first = orjson.loads(await reader.readline() or b"[]")
            self._lines = _Lines(writer)
            self._receive(first)
            connected.set_result(self._lines)
            async for line in reader:
                self._receive(orjson.loads(line))
        except TimeoutError:
            why = f"no answer within {CONNECT_TIMEOUT_S:g} s"
        except orjson.JSONDecodeError:
            why = "it does not accept the token"
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        finally:
            self._lines = None
            self._lost = self._unreachable(why)
            if not connected.done():
                connected.set_exception(self._lost)
                connected.exception()  # seen, should nobody wait for it
            for turn in self._turns.values():
                if not turn.done():
                    turn.set_exception(self._lost)
            if writer is not None:
                writer.close()

    def _receive(self, messages: list[list[Any]]) -> None:
        for what, *rest in messages:
            if what == "limited":
                self.limited = frozenset(rest[0])
            elif what == "spent":
                self.spent = rest[0]
            elif what == "stop":
                self.stopped = rest[0]
            else:
                turn = self._turns.get(rest[0])
                if turn is None or turn.done():
                    continue
                if what == "refuse":
                    turn.set_exception(LimitError(rest[1]))
                else:
                    turn.set_result(rest[1] if what == "answer" else None)

    def _unreachable(self, why: str) -> JobServiceError:
        host, port = self._address
        return JobServiceError(
            f"the service at {host}:{port}, which keeps the limits of all workers of the job, cannot be reached "
            f"({why}). No call is made without it. It ends with the process that started the job: look there first"
        )


class _There:
    """A place of a call within a limit that a service keeps."""

    __slots__ = ("_call", "_job", "_lines")

    def __init__(self, job: RemoteJob, lines: _Lines, call: int) -> None:
        self._job = job
        self._lines = lines
        self._call = call

    def used(self, tokens: float) -> None:
        self._lines.send("used", self._call, tokens)

    def leave(self, refused: bool = False, retry_after: float | None = None) -> None:
        self._lines.send("leave", self._call, refused, retry_after)


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
