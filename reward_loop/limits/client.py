"""Clients of the limiter service: `RemoteLimits` for a worker of a job, `ProcessCall` for a function in a process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from reward_loop._util.framing import frame, read_frame, receive_frame
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, JobServiceError, LimitError, TooManyFailuresError
from reward_loop.limits.local import LocalLimits
from reward_loop.limits.permit import ABANDONED, Limits, Permit, live
from reward_loop.limits.protocol import (
    CONNECT_TIMEOUT_S,
    MAX_LENGTH,
    Messages,
    decode,
    enable_keepalive,
    encode,
    proof,
    receive,
)
from reward_loop.records import TEXT_FIELDS, encode_record

__all__ = ["CallConnection", "ProcessCall", "RemoteLimits", "open_limits"]

_MAX_EXCHANGE = MAX_LENGTH // 2

_ERRORS = {kind.__name__: kind for kind in (LimitError, JobServiceError)}


def open_limits(options: RewardLoopConfig) -> Limits:
    """Return new limits: a client of the limiter service at ``options.job``, or local limits if it is not set.

    Raises:
        ConfigError: ``options.job`` is not an address.
    """
    return RemoteLimits(options.job, options) if options.job else LocalLimits(options)


class RemoteLimits(Limits):
    """Limits kept by a limiter service. Connects at the first use in an event loop, and after a lost connection.

    Args:
        address: ``host:port:token``, as returned by `LimitServer.start`.
        options: the limits assumed until the service has sent its own.

    Raises:
        ConfigError: ``address`` has another form.
    """

    def __init__(self, address: str, options: RewardLoopConfig | None = None) -> None:
        try:
            host, port, self._token = address.rsplit(":", 2)
            self._address = host, int(port)
        except ValueError:
            raise ConfigError("reward_loop.job: expected host:port:token, the address of a limiter service") from None
        self.name = f"{host}:{port}"
        self.options = options or RewardLoopConfig(job=address)
        self.max_waits = {name: limit.max_wait for name, limit in self.options.limits.items()}
        self.stopped: str | None = None
        """Why the run must stop, once too many samples of the job have failed."""
        self._messages: Messages | None = None
        self._connection: asyncio.Task[None] | None = None
        self._lost: JobServiceError | None = None
        self._numbers = itertools.count()
        self._permits: dict[int, Permit] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}

    def open(
        self, name: str, tokens: float, traffic_class: str, settled: Callable[[Permit], None] | None = None
    ) -> Permit:
        """Request a permit; see `Limits.open`."""
        messages = self._connect()
        permit = Permit(self, name, tokens, traffic_class, settled)
        permit.id = next(self._numbers)
        messages.send("enter", permit.id, name, tokens, traffic_class)
        self._permits[permit.id] = permit
        permit.expire_after(self.max_waits.get(name))
        return permit

    def correct(self, permit: Permit, tokens: float) -> None:
        """Replace the token estimate of a permit."""
        if permit.id in self._permits:
            self._connect().send("used", permit.id, tokens)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        """End a permit. If the connection was lost, the service has already ended it."""
        if self._permits.pop(permit.id, None) is not None:
            self._connect().send("leave", permit.id, accepted, retry_after)

    def spend(self, cost: float, tokens: float) -> None:
        """Add a call's usage to the budget."""
        self._connect().send("spend", cost, tokens)

    def count(self, failed: bool, error: str | None, of: str = "") -> None:
        """Count one sample, or one component of a sample, for the failure bound of the job.

        Args:
            failed: whether the sample failed.
            error: the error message of a failed sample.
            of: the name of the component; ``""`` for whole samples.

        Raises:
            TooManyFailuresError: the service has counted too many failures; raised at one of the next samples.
            JobServiceError: the service is unreachable.
        """
        if self.stopped is not None:
            raise TooManyFailuresError(self.stopped)
        lost = self._lost
        messages = self._connect()
        if lost is not None:
            raise lost
        # The error may contain model output with surrogates, which UTF-8 cannot encode.
        messages.send("count", failed, error and error.encode("utf-8", "backslashreplace").decode(), of)

    async def why_stopped(self) -> str | None:
        """Return why the run must stop, or ``None``. Takes all samples into account that were counted here before."""
        try:
            await self.status()
        except JobServiceError as error:
            return str(error)
        return None if self.stopped is None else f"TooManyFailuresError: {self.stopped}"

    async def configure(self, name: str, changes: dict[str, Any]) -> None:
        """Change options of a limit, or add a limit; see `Limits.configure`."""
        refusal = await self._ask("configure", name, changes)
        if refusal is not None:
            raise ConfigError(refusal)

    async def status(self) -> dict[str, Any]:
        """Return the limits and their current usage."""
        status: dict[str, Any] = await self._ask("status")
        return status

    def close(self) -> None:
        """Close the connection, which ends its permits."""
        live.discard(self)
        self.loop = None
        if self._connection is not None and not (loop := self._connection.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._connection.cancel)

    async def _ask(self, question: str, *arguments: Any) -> Any:
        messages, number = self._connect(), next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        messages.send(question, number, *arguments)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise self._unreachable(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(number, None)

    def _connect(self) -> Messages:
        """Return the message queue of the connection; open a connection if there is none."""
        self.check_loop()
        assert self.loop is not None
        if self._connection is not None and self._connection.get_loop() is not self.loop:
            self._messages, self._permits, self._answers = None, {}, {}  # they belong to an earlier event loop
        if self._messages is None:
            self._messages = Messages()
            self._connection = self.loop.create_task(self._run(self._messages))
        return self._messages

    async def _run(self, messages: Messages) -> None:
        writer: asyncio.StreamWriter | None = None
        why, closed = "the connection has ended", False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(*self._address)
                enable_keepalive(writer)
                writer.write(frame(proof(self._token, await read_frame(reader, MAX_LENGTH))))
                first = await read_frame(reader, MAX_LENGTH)
            if not first:
                raise ConnectionError("the service does not accept the token")
            self._receive(decode(first))
            self._lost = None
            messages.connect(writer)
            while True:
                self._receive(await receive(reader))
        except asyncio.CancelledError:
            closed, why = True, "this process has closed the connection"
        except EOFError:
            pass
        except TimeoutError:
            why = f"no answer within {CONNECT_TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        finally:
            lost = self._unreachable(why)
            if self._messages is messages:
                self._messages = None
                self._lost = None if closed else lost
                permits, self._permits = self._permits, {}
                for permit in permits.values():
                    permit.refuse(lost)
                for answer in self._answers.values():
                    if not answer.done():
                        answer.set_exception(lost)
            if writer is not None:
                writer.close()

    def _receive(self, messages: list[list[Any]]) -> None:
        for what, *rest in messages:
            if what == "grant":
                if (permit := self._permits.get(rest[0])) is not None:
                    permit.grant()
            elif what == "refuse":
                number, kind, why = rest
                if (permit := self._permits.pop(number, None)) is not None:
                    permit.refuse(_ERRORS.get(kind, LimitError)(why))
            elif what == "limits":
                self.max_waits = rest[0]
            elif what == "spent":
                self.spent = rest[0]
            elif what == "stop":
                self.stopped = rest[0]
            elif (answer := self._answers.get(rest[0])) is not None and not answer.done():
                answer.set_result(rest[1])

    def _unreachable(self, why: str) -> JobServiceError:
        return JobServiceError(
            f"the limiter service at {self.name} is unreachable ({why}). It keeps the limits of all workers of the "
            "job, so no calls are made without it. It runs in the process that started the job: check that process "
            "first"
        )


class ProcessCall:
    """The client in a worker process, for the current call: requests permits from the process that made the call.

    Each permit has its own connection. So the permit ends when the process dies, and an alarm that interrupts one wait
    does not affect other permits.

    Args:
        address: the local socket of the process that made the call.
        token: the token of the call.
        is_recorded: whether the sample has a record.
    """

    def __init__(self, address: str, token: str, is_recorded: bool = False) -> None:
        self._address = address
        self._token = token
        self.is_recorded = is_recorded

    async def enter(self, name: str, tokens: float) -> tuple[CallConnection, Permit]:
        """Wait for a permit, on the function's own event loop.

        Raises:
            LimitError: the permit was refused.
            JobServiceError: the limiter service is unreachable.
        """
        connection = CallConnection(name)
        with connection.closed_on_error():
            self._send(connection, "enter", 0, name, tokens, "")
            await connection.readable()
            return connection, connection.permit()

    def enter_in_thread(self, name: str, tokens: float) -> tuple[CallConnection, Permit]:
        """Wait for a permit, as `enter` does, without an event loop."""
        connection = CallConnection(name)
        with connection.closed_on_error():
            self._send(connection, "enter", 0, name, tokens, "")
            return connection, connection.permit()

    def spend(self, cost: float, tokens: float) -> None:
        """Report what the call used outside of its permits."""
        self._report("spend", cost, tokens)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Report how the service responded to a request outside of permits, with the arguments of `Permit.leave`."""
        self._report("answer", accepted, retry_after)

    def exchange(self, fields: Mapping[str, Any]) -> None:
        """Report an exchange with a model server, or further fields of it, for the record of the sample.

        The texts of an exchange above `_MAX_EXCHANGE` bytes are left out.
        """
        content = encode_record(fields)
        if len(content) > _MAX_EXCHANGE:
            small = {name: value for name, value in fields.items() if name not in TEXT_FIELDS}
            content = encode_record({**small, "record_error": f"{len(content)} bytes are too long for a record"})
        with contextlib.suppress(OSError):  # for example, no free file descriptor: a record must not cost the sample
            self._report("exchange", orjson.Fragment(content))

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that uses this object, at once in this thread."""
        function(*arguments)

    def _report(self, *message: Any) -> None:
        connection = CallConnection("")
        with contextlib.suppress(LimitError), connection.closed_on_error():
            self._send(connection, *message)
            connection.send(("close",))
            connection.close()

    def _send(self, connection: CallConnection, *message: Any) -> None:
        connection.socket.connect(self._address)
        connection.send(("call", self._token), message)


class CallConnection:
    """The connection of one permit of a `ProcessCall`; also the permit's `Holder`."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(None)  # the function may have called `socket.setdefaulttimeout`
        self._name = name

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the connection if the block fails.

        Raises:
            LimitError: the connection failed.
        """
        try:
            yield
        except ConnectionError as error:
            self.socket.close()
            raise LimitError(f"limit {self._name!r}: the process that made the call is unreachable: {error}") from error
        except BaseException:
            self.socket.close()
            raise

    async def readable(self) -> None:
        """Wait until a response has arrived or the connection has ended, on the function's own event loop."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self.socket, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self.socket)

    def permit(self) -> Permit:
        """Wait for the response, and return the permit.

        Raises:
            LimitError: the permit was refused.
            JobServiceError: the limiter service is unreachable from the process that made the call.
        """
        try:
            ((what, _, *refusal),) = decode(receive_frame(self.socket))
        except EOFError:
            raise LimitError(ABANDONED) from None
        if what == "refuse":
            kind, why = refusal
            raise _ERRORS.get(kind, LimitError)(why)
        permit = Permit(self, self._name)
        permit.grant()
        return permit

    def correct(self, permit: Permit, tokens: float) -> None:
        """Replace the token estimate of the permit."""
        self.send(("used", 0, tokens))

    def spend(self, cost: float, tokens: float) -> None:
        """Report what the call used within the permit."""
        self.send(("spend", cost, tokens))

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that uses this object, at once in this thread."""
        function(*arguments)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        """End the permit by a message: closing is not enough, as a forked process may hold a copy of the socket."""
        self.send(("leave", 0, accepted, retry_after), ("close",))

    def close(self) -> None:
        """Wait until the peer has processed all messages, and close the connection."""
        with self.socket, contextlib.suppress(ConnectionError, EOFError):
            receive_frame(self.socket)

    async def close_async(self) -> None:
        """Close the connection, as `close` does, on the function's own event loop."""
        with self.socket:
            await self.readable()
            self.close()

    def send(self, *messages: tuple[Any, ...]) -> None:
        """Send messages, ignoring a closed connection: after the end of the call, its messages have no effect."""
        with contextlib.suppress(OSError):
            self.socket.sendall(encode(*messages))
