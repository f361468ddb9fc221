"""Limits inside functions that run in processes of their own: the process asks the one that called it.

A place is a connection to a local socket of that process. So a process that is killed gives back what it held, and an
alarm that goes off in the midst of a wait spoils nothing that others use. Lines of JSON:

    the process of the function                     the process that called it
    [key, name, tokens]                             ["", ""], once it is let in, or [error, message]
    ["used", tokens, cost], ["add", tokens]
    ["end", refused, retry_after], or it closes
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from reward_loop._util.transient import is_refusal, retry_after
from reward_loop.errors import JobServiceError, LimitError
from reward_loop.limits import lease as leases
from reward_loop.limits.lease import CallLimits, Lease, amount
from reward_loop.processes import worker

__all__ = ["FarLease", "enter", "enter_async", "within_reach"]

_ERRORS = {kind.__name__: kind for kind in (LimitError, JobServiceError)}

_calls: dict[str, CallLimits] = {}
"""The calls that are at work in processes, by keys that only these know."""
_listeners: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[str, None], str]] = {}


@contextlib.asynccontextmanager
async def within_reach(call: CallLimits) -> AsyncIterator[tuple[str, str]]:
    """Let the process that a call runs in take part in its limits.

    Yields:
        What the worker process needs, as its `worker.context`.
    """
    key = secrets.token_hex(16)
    address = await _listening()
    _calls[key] = call
    try:
        yield address, key
    finally:
        del _calls[key]


async def _listening() -> str:
    loop = asyncio.get_running_loop()
    if loop not in _listeners:
        for ended in [other for other in _listeners if other.is_closed()]:
            del _listeners[ended]
        # A loop that shuts down closes its asynchronous generators, so a listener that lives in one is closed in time.
        listener = _listen(loop)
        address = await anext(listener)
        if loop in _listeners:  # another call was quicker
            await listener.aclose()
        else:
            _listeners[loop] = listener, address
    return _listeners[loop][1]


async def _listen(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[str, None]:
    # In Linux' abstract namespace: there is no file that a killed process could leave behind.
    address = f"\0reward-loop/limits/{secrets.token_hex(16)}"
    server = await asyncio.start_unix_server(_serve, address)
    try:
        yield address
    finally:
        server.close()
        if _listeners.get(loop, ("", ""))[1] == address:
            del _listeners[loop]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One place, from its being asked for to its end."""
    lease: Lease | None = None
    try:
        key, name, tokens = json.loads(await reader.readline())
        call = _calls.get(key)
        if call is None:
            return
        try:
            lease = await _enter(call, name, tokens, reader)
        except (LimitError, JobServiceError) as error:
            writer.write(json.dumps([type(error).__name__, str(error)]).encode() + b"\n")
        if lease is None:
            return
        writer.write(b'["", ""]\n')
        while line := await reader.readline():
            what, *rest = json.loads(line)
            if what == "used":
                lease.used(*rest)
            elif what == "add":
                lease.add(*rest)
            else:
                refused, seconds = rest
                if refused:
                    lease.refused(seconds)
                return
    except (OSError, ValueError):
        pass  # The connection is of no more use, whatever ended it.
    finally:
        if lease is not None:
            lease.end(None)
        writer.close()


async def _enter(call: CallLimits, name: str, tokens: float, reader: asyncio.StreamReader) -> Lease | None:
    """Wait for a place; for none, once the process that asks is killed, or gives up."""
    entering = asyncio.create_task(leases.enter(call, name, tokens))
    gone = asyncio.create_task(reader.readline())  # all that can come meanwhile is the end
    try:
        await asyncio.wait((entering, gone), return_when=asyncio.FIRST_COMPLETED)
        return entering.result() if entering.done() else None
    finally:
        entering.cancel()
        gone.cancel()
        await asyncio.gather(entering, gone, return_exceptions=True)


class FarLease(Lease):
    """A place that the process has that called this one."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(None, None)
        self._connection = connection

    def used(self, tokens: float | None = None, cost: float | None = None) -> None:
        """As `Lease.used`."""
        self._tell("used", amount("tokens", tokens), amount("cost", cost))

    def add(self, tokens: float) -> None:
        """As `Lease.add`."""
        self._tell("add", amount("tokens", tokens))

    def end(self, error: BaseException | None) -> None:
        """Leave the place."""
        refused, seconds = self._refused
        if error is not None and is_refusal(error):
            refused, seconds = True, retry_after(error)
        # In words: a copy of the connection may be open in a process that the function has forked.
        self._tell("end", refused, seconds)
        self._connection.close()

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the call is over, and nobody counts any more
            self._connection.sendall(json.dumps(message).encode() + b"\n")


def enter(name: str, tokens: float) -> FarLease:
    """Wait for a place within a limit, in a process of the function's own.

    Raises:
        LimitError: there will be none for this call.
        JobServiceError: whoever keeps the limits for all workers cannot be reached.
    """
    connection = _ask(name, tokens)
    try:
        with connection.makefile("rb") as answers:
            return _let_in(connection, answers.readline())
    except BaseException:
        connection.close()
        raise


async def enter_async(name: str, tokens: float) -> FarLease:
    """The same, where a sync function runs an event loop of its own."""
    connection = _ask(name, tokens)
    try:
        connection.setblocking(False)
        answer = b""
        while not answer.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
            answer += more or b"\n"
        connection.setblocking(True)
        return _let_in(connection, answer)
    except BaseException:
        connection.close()
        raise


def _ask(name: str, tokens: float) -> socket.socket:
    address, key = worker.context
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(json.dumps([key, name, tokens]).encode() + b"\n")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise LimitError(f"limit {name!r}: the process that called this one cannot be asked: {error}") from error
        raise
    return connection


def _let_in(connection: socket.socket, answer: bytes) -> FarLease:
    if not answer.strip():
        raise LimitError("the call that asked for a place within a limit is over")
    kind, message = json.loads(answer)
    if kind:
        raise _ERRORS[kind](message)
    return FarLease(connection)
