"""Limits inside functions that run in worker processes: `ProcessCall` there, `serve_call` in the calling process.

Each permit has its own connection, and so has each report outside of permits; `protocol` has the messages. So a permit
ends when the process dies, and an alarm that interrupts one wait does not affect other permits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import orjson

from reward_loop._util.framing import receive_frame
from reward_loop._util.sockets import readable
from reward_loop.errors import LimitError
from reward_loop.limits.permit import ABANDONED, Permit
from reward_loop.limits.protocol import MAX_LENGTH, decode, encode, receive, refusal
from reward_loop.limits.scope import CallScope, current_scope
from reward_loop.limits.server import AUTHENTICATION_TIMEOUT_S, Connection, closing
from reward_loop.processes import worker
from reward_loop.records import TEXT_FIELDS, encode_record, hide

__all__ = ["ProcessCall", "current_call", "serve_call"]

_MAX_EXCHANGE = MAX_LENGTH // 2


class ProcessCall:
    """The current call of a worker process, and the connection of at most one permit; also the permit's `Holder`.

    Args:
        address: the local socket of the process that made the call.
        token: the token of the call.
        is_recorded: whether the sample has a record.
    """

    def __init__(self, address: str, token: str, is_recorded: bool = False) -> None:
        self._address = address
        self._token = token
        self.is_recorded = is_recorded
        self._socket: socket.socket | None = None

    async def enter(self, name: str, tokens: float) -> Permit:
        """Wait for a permit, on the function's own event loop; raises as `Permit.wait` does."""
        with self._connected(name, ("enter", 0, name, tokens, "")) as connection:
            await readable(connection)
            return self._granted(name, connection)

    def enter_in_thread(self, name: str, tokens: float) -> Permit:
        """Wait for a permit, as `enter` does, without an event loop."""
        with self._connected(name, ("enter", 0, name, tokens, "")) as connection:
            return self._granted(name, connection)

    @contextlib.contextmanager
    def _connected(self, name: str, *messages: tuple[Any, ...]) -> Iterator[socket.socket]:
        """Connect and send messages; close the connection if the block fails.

        Raises:
            LimitError: the connection failed.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(None)  # the function may have called `socket.setdefaulttimeout`
        try:
            connection.connect(self._address)
            _send(connection, ("call", self._token), *messages)
            yield connection
        except ConnectionError as error:
            connection.close()
            raise LimitError(f"limit {name!r}: the process that made the call is unreachable: {error}") from error
        except BaseException:
            connection.close()
            raise

    def _granted(self, name: str, connection: socket.socket) -> Permit:
        try:
            ((what, _, *why),) = decode(receive_frame(connection))
        except EOFError:
            raise LimitError(ABANDONED) from None
        if what == "refuse":
            raise refusal(*why)
        self._socket = connection
        permit = Permit(self, name)
        permit.grant()
        return permit

    def correct(self, permit: Permit, tokens: float) -> None:
        """Replace the token estimate of the permit."""
        self._report("used", 0, tokens)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        """End the permit by a message: closing is not enough, as a forked process may hold a copy of the socket."""
        assert self._socket is not None
        _send(self._socket, ("leave", 0, accepted, retry_after), ("close",))

    def spend(self, cost: float, tokens: float) -> None:
        """Report what the call used."""
        self._report("spend", cost, tokens)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Report how the service responded to a request of the call; see `Permit.answer`."""
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
        """Send a message on the permit's connection; without one, on a new connection, until it is processed."""
        if self._socket is not None:
            _send(self._socket, message)
            return
        with contextlib.suppress(LimitError), self._connected("", message, ("close",)) as connection:
            _close(connection)

    def close(self) -> None:
        """Wait until the peer has processed all messages, and close the connection of the permit."""
        assert self._socket is not None
        _close(self._socket)


def _send(connection: socket.socket, *messages: tuple[Any, ...]) -> None:
    """Send messages, ignoring a closed connection: after the end of the call, its messages have no effect."""
    with contextlib.suppress(OSError):
        connection.sendall(encode(*messages))


def _close(connection: socket.socket) -> None:
    """Wait until the peer has processed the message ``close``, and close the connection."""
    with connection, contextlib.suppress(ConnectionError, EOFError):
        receive_frame(connection)


def current_call() -> CallScope | ProcessCall | None:
    """Return the reward function call that the current code belongs to, also in a worker process."""
    if worker.is_worker:
        return None if worker.context is None else ProcessCall(*worker.context)
    return current_scope.get()


_calls: dict[str, CallScope] = {}
"""The calls in worker processes that run now, by their token."""

_listeners: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[None, None], str]] = {}
"""For each event loop, the generator that holds its socket, and the address of the socket."""


@contextlib.asynccontextmanager
async def serve_call(call: CallScope) -> AsyncIterator[tuple[str, str, bool]]:
    """Serve a call in a worker process during the context; yield the arguments of its `ProcessCall`."""
    address, token = await _address(), secrets.token_hex(16)
    _calls[token] = call
    try:
        yield address, token, call.sample is not None and call.sample.is_recorded
    finally:
        del _calls[token]


async def _address() -> str:
    """Return the address of the socket of the running event loop, which listens until the event loop shuts down."""
    loop = asyncio.get_running_loop()
    if loop not in _listeners:
        for ended in [other for other in _listeners if other.is_closed()]:
            del _listeners[ended]
        # A Linux abstract socket: a killed process leaves no file behind.
        address = f"\0reward-loop/limits/{secrets.token_hex(16)}"
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen()  # from here on, concurrent calls can use the address
        # An event loop closes its async generators when it shuts down, and this one then closes its socket.
        listener = _listen(loop, listening)
        _listeners[loop] = listener, address
        await anext(listener)
        return address
    return _listeners[loop][1]


async def _listen(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> AsyncGenerator[None, None]:
    try:
        server = await asyncio.start_unix_server(_serve, sock=listening)
        try:
            yield
        finally:
            server.close()
    finally:
        _listeners.pop(loop, None)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer):
        async with asyncio.timeout(AUTHENTICATION_TIMEOUT_S):
            first = await receive(reader)
        match first:
            case [["call", str(token)], *messages] if token in _calls:
                call = _calls[token]
                connection = Connection(call, writer)
                connection.handlers |= {"answer": call.answer, "exchange": partial(_record_exchange, call)}
                await connection.run(reader, messages)


def _record_exchange(call: CallScope, fields: dict[str, Any]) -> None:
    """Add an exchange of a function in a worker process, or further fields of it, to the record of its sample."""
    if call.sample is None:
        return
    if (variable := fields.get("api_key_env")) and (key := os.environ.get(variable)):
        hide(key.strip())
    call.sample.prompt_tokens += fields.get("prompt_tokens", 0)
    call.sample.completion_tokens += fields.get("completion_tokens", 0)
    call.sample.exchange({**fields, "attempt": call.attempt})
