"""The pool's connection to one worker process.

=================  ====================================================================================
State of a worker  Next
=================  ====================================================================================
starting           Receives the setup and the first arguments; must send `STARTED` in `_START_SECONDS`
running a call     `ENDED`: idle. `ENDED_LAST`, `DIED`, timeout or cancellation: closed
idle               Receives the next call, or is closed by the pool
closed             The fork server kills the process; the pool starts another one for the next call
=================  ====================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable
from typing import Any, Protocol

from reward_loop._util.framing import FrameBuffer, frame
from reward_loop._util.signals import name_of
from reward_loop._util.sockets import readable
from reward_loop.errors import RewardCrashedError
from reward_loop.processes.forkserver import DeathReport
from reward_loop.processes.outcome import CallOutcome
from reward_loop.processes.worker import ANSWER, CALL, DIED, ENDED, STARTED, TOLD, unpack

__all__ = ["Caller", "DiedIdleError", "WorkerConnection"]

_START_SECONDS = 300.0
"""Seconds for a worker to import the function's module. Importing verl with torch can take 30 s on a busy machine."""
_REPORT_SECONDS = 5.0
"""Seconds to wait for the report on a killed worker."""


class DiedIdleError(Exception):
    """A worker died while it was idle, so the next call did not start."""


class Caller(Protocol):
    """The side of a call that is outside of the worker."""

    context: Any
    """What the worker gets as `worker.context` during the call."""

    def begin(self, ended: asyncio.Future[Any]) -> None:
        """Start the clock of the deadline. At the deadline, set a `TimeoutError` on ``ended``: the worker is killed."""

    def told(self, message: tuple[Any, ...], answer: Callable[[int, Any], None]) -> None:
        """Handle a message of the function; ``answer`` sends the value for the number of a question."""


class WorkerConnection:
    """Runs calls in one worker process, one at a time.

    Args:
        channel: the pool's end of the socket pair.
        setup: the frame with the worker's `Setup`.
    """

    def __init__(self, channel: socket.socket, setup: bytes) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._setup = setup
        self._frames = FrameBuffer()
        self._calls = 0
        """The number of calls that were sent; see `worker.Channel.call`."""
        self.usable = False
        """Whether the worker is idle and can run another call."""
        self.is_closed = False
        self.place: Any = None
        """What `pool.Prover` keeps about the worker."""

    async def call(self, content: bytes, caller: Caller) -> CallOutcome:
        """Run one call.

        Args:
            content: the pickled context and arguments.
            caller: gets the start of the function and its messages.

        Raises:
            TimeoutError: the deadline passed. The message contains the stack of the user's code.
            RewardCrashedError: the worker died during the call, did not load the function in time, or sent an invalid
                message.
            DiedIdleError: the worker died before the call started, after it had completed an earlier one.
        """
        was_idle, self.usable = self.usable, False
        setup, self._setup = self._setup, b""
        self._calls += 1
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[bytes, memoryview]] = loop.create_future()
        started = False
        try:
            async with asyncio.timeout(_START_SECONDS) as loading:

                def begin() -> None:
                    nonlocal started
                    started = True
                    loading.reschedule(None)
                    caller.begin(ended)

                loop.add_reader(self._channel, self._receive, ended, begin, caller)
                # The worker reads the arguments after loading the function, so sending may block until then.
                with contextlib.suppress(ConnectionError):  # the worker is dead; receiving will report it
                    await loop.sock_sendall(self._channel, setup + frame(CALL, content))
                kind, answer = await ended
        except TimeoutError:
            loop.remove_reader(self._channel)
            at = await self._kill(caller)
            if not started:
                raise RewardCrashedError(
                    f"was not loaded in a worker process within {_START_SECONDS:g} s{at}"
                ) from None
            raise TimeoutError(at) from None
        finally:
            loop.remove_reader(self._channel)
        if kind == DIED:
            if was_idle and not started:
                raise DiedIdleError
            raise RewardCrashedError(_death(answer))
        self.usable = kind == ENDED
        return unpack(answer)

    def close(self) -> None:
        """Close the connection; the fork server then kills the worker if it is alive."""
        self.is_closed = True
        # Shut down before closing: a forked copy of this process may hold a copy of the socket.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def _receive(self, ended: asyncio.Future[Any], begin: Callable[[], None], caller: Caller) -> None:
        """Handle the messages that have arrived, until one of them ends the call."""
        try:
            is_open = self._read()
            while not ended.done() and (message := self._frames.pop()) is not None:
                kind, content = message[:1], memoryview(message)[1:]
                if kind == STARTED:
                    begin()
                elif kind == TOLD:
                    self._pass_on(content, caller)
                else:
                    ended.set_result((kind, content))
            if not is_open and not ended.done():
                ended.set_result((DIED, memoryview(b"")))
        except Exception as error:
            if not ended.done():
                problem = f"sent a message from its worker process that failed: {type(error).__name__}: {error}"
                ended.set_exception(RewardCrashedError(problem))

    def _pass_on(self, content: memoryview, caller: Caller) -> None:
        call, *message = pickle.loads(content)
        if call == self._calls:  # otherwise from a thread that an earlier call has left behind
            caller.told(tuple(message), self._answer)

    def _read(self) -> bool:
        """Read what has arrived; return whether the connection is still open."""
        try:
            received = self._channel.recv(1 << 16)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._frames.feed(received)
        return bool(received)

    def _answer(self, number: int, value: Any) -> None:
        """Answer a question of the function. If thousands of answers are unread, the connection ends."""
        data = frame(ANSWER, pickle.dumps((number, value)))
        try:
            complete = self._channel.send(data) == len(data)
        except BlockingIOError:
            complete = False
        except OSError:
            return  # the worker is dead, or is being killed
        if not complete:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    async def _kill(self, caller: Caller) -> str:
        """Have the fork server kill the worker, wait for the report, and return the user's stack, or ``""``.

        The last messages of the function are passed on: what it has spent counts.
        """
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while True:
                    while (message := self._frames.pop()) is not None:
                        content = memoryview(message)[1:]
                        if message[:1] == DIED:
                            return _at(pickle.loads(content))
                        if message[:1] == TOLD:
                            self._pass_on(content, caller)
                    await readable(self._channel)
                    if not self._read():
                        return ""
        return ""


def _death(content: memoryview) -> str:
    """Return the error message of a worker that died, from its `DeathReport`, which is empty if there is none."""
    if not content:
        return "lost its worker process, or none could be started"
    report: DeathReport = pickle.loads(content)
    if report.memory_mb is not None:
        used = f"{report.memory_mb:.0f} MB, more than max_memory_mb={report.max_memory_mb}"
        return f"was killed: its worker process used {used}"
    if report.code >= 0:
        return f"ended its worker process with exit status {report.code}{_at(report)}"
    name = name_of(-report.code)
    hint = ", perhaps by the kernel because memory ran out" if name == "SIGKILL" else ""
    if report.limit:
        hint = f": {report.limit}"
    return f"crashed: its worker process was killed by {name}{hint}{_at(report)}"


def _at(report: DeathReport) -> str:
    return f", at\n{report.stack}" if report.stack else ""
