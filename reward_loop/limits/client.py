"""A job that a service keeps, seen from a worker."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import orjson

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, JobServiceError, LimitError, TooManyFailuresError
from reward_loop.limits.permit import Place
from reward_loop.limits.protocol import CONNECT_TIMEOUT_S, MAX_LINE, Lines, notice_death, proof

__all__ = ["RemoteJob"]


class RemoteJob:
    """A `Job` that a service keeps. Connects by itself, in the running loop.

    Args:
        address: ``host:port:token``, as `JobService.start` returns it.
        options: the limits, for their names and longest waits until the service has said what they are.
    """

    def __init__(self, address: str, options: RewardLoopConfig | None = None) -> None:
        try:
            host, port, token = address.rsplit(":", 2)
            self._address = host, int(port)
        except ValueError:
            raise ConfigError("reward_loop.job: expected host:port:token, as the service gives it") from None
        self._token = token
        self.name = f"{host}:{port}"
        self._max_waits = {name: limit.max_wait for name, limit in (options or RewardLoopConfig()).limits.items()}
        self.limited = frozenset(self._max_waits)
        self.spent: str | None = None
        self.stopped: str | None = None
        self._lost: JobServiceError | None = None
        self._lines: Lines | None = None
        self._connection: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[Lines] | None = None
        self._ids = itertools.count()
        self._turns: dict[int, asyncio.Future[Any]] = {}

    async def enter(self, name: str, tokens: float, share: str) -> Place:
        """Wait for a place within a limit."""
        lines = await self._connect()
        call, turn = next(self._ids), asyncio.get_running_loop().create_future()
        place = _There(self, lines, call)
        max_wait = self._max_waits.get(name)
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

    def count(self, failed: bool, error: str | None, of: str = "") -> None:
        """Count one sample, or what ``of`` names in it; what the service makes of it is raised at one of the next."""
        if self.stopped is not None:
            raise TooManyFailuresError(self.stopped)
        if self._lost is not None:
            raise self._lost
        # What a model wrote may be quoted in it, with surrogates that have no UTF-8.
        self._send("count", failed, error and error.encode("utf-8", "backslashreplace").decode(), of)

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

        def send(connected: asyncio.Future[Lines]) -> None:
            if not connected.cancelled() and connected.exception() is None:
                connected.result().send(*message)

        self._open().add_done_callback(send)

    async def _connect(self) -> Lines:
        if self._lines is not None:
            return self._lines
        lines = await asyncio.shield(self._open())
        if self._lines is not lines:  # it has ended meanwhile: nobody would answer
            raise self._lost or self._unreachable("it has gone")
        return lines

    def _open(self) -> asyncio.Future[Lines]:
        if self._connected is None or (self._connected.done() and self._lines is None):
            self._connected = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._run(self._connected))
        return self._connected

    async def _run(self, connected: asyncio.Future[Lines]) -> None:
        writer: asyncio.StreamWriter | None = None
        why = "it has gone"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address, limit=MAX_LINE)
                notice_death(writer)
                nonce = (await reader.readline()).decode().strip()
                writer.write(proof(self._token, nonce).encode() + b"\n")
                first = orjson.loads(await reader.readline() or b"[]")
            self._lines = Lines(writer)
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
                self._max_waits = rest[0]
                self.limited = frozenset(self._max_waits)
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

    def __init__(self, job: RemoteJob, lines: Lines, call: int) -> None:
        self._job = job
        self._lines = lines
        self._call = call

    def used(self, tokens: float) -> None:
        self._lines.send("used", self._call, tokens)

    def leave(self, refused: bool = False, retry_after: float | None = None) -> None:
        self._lines.send("leave", self._call, refused, retry_after)
