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
import time
from collections.abc import Callable

from reward_loop._util.framing import FrameBuffer
from reward_loop._util.signals import name_of
from reward_loop.errors import RewardCrashedError
from reward_loop.processes.forkserver import Report
from reward_loop.processes.invocation import CallOutcome, Invocation
from reward_loop.processes.worker import DIED, ENDED, STARTED, unpack

__all__ = ["DiedIdleError", "WorkerConnection"]

_START_SECONDS = 300.0
"""Seconds for a worker to import the function's module. Importing verl with torch can take 30 s on a busy machine."""
_REPORT_SECONDS = 5.0
"""Seconds to wait for the report on a killed worker."""


class DiedIdleError(Exception):
    """A worker died while it was idle, so the next call did not start."""


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
        self.usable = False
        """Whether the worker is idle and can run another call."""

    async def call(
        self, call: Invocation, arguments: bytes, timeout: float | None, waited: Callable[[float], float]
    ) -> CallOutcome:
        """Run one call.

        Args:
            call: the call; only its ``started`` is used, and set.
            arguments: the frame with the arguments.
            timeout: seconds from the start of the function to its deadline.
            waited: returns the seconds of waiting up to the given `time.monotonic` that do not count towards the
                deadline.

        Raises:
            TimeoutError: the deadline passed.
            RewardCrashedError: the worker died during the call, or did not load the function in time.
            DiedIdleError: the worker died before the call started, after it had completed an earlier one.
        """
        was_idle, self.usable = self.usable, False
        setup, self._setup = self._setup, b""
        call.started = None
        try:
            # The worker reads the arguments after loading the function, so sending may block until then.
            async with asyncio.timeout(_START_SECONDS):
                with contextlib.suppress(ConnectionError):  # the worker is dead; reading will report it
                    await asyncio.get_running_loop().sock_sendall(self._channel, setup + arguments)
            running = _RunningCall(call, timeout, waited)
            try:
                kind, content = await self._receive(running.receive, running.ended)
            finally:
                running.timer.cancel()
        except TimeoutError:
            at = await self._kill()
            if call.started is None:
                raise RewardCrashedError(
                    f"was not loaded in a worker process within {_START_SECONDS:g} s{at}"
                ) from None
            raise TimeoutError(at) from None
        if kind == DIED:
            if was_idle and call.started is None:
                raise DiedIdleError
            raise RewardCrashedError(_death(content))
        self.usable = kind == ENDED
        return unpack(content)

    def close(self) -> None:
        """Close the connection; the fork server then kills the worker if it is alive."""
        # Shut down before closing: a forked copy of this process may hold a copy of the socket.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    async def _kill(self) -> str:
        """Have the fork server kill the worker, wait for the report, and return the user's stack, or ``""``."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        died: asyncio.Future[_Message] = asyncio.get_running_loop().create_future()

        def receive(kind: bytes, content: memoryview) -> None:
            if kind == DIED and not died.done():
                died.set_result((kind, content))

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                _, content = await self._receive(receive, died)
                return _at(pickle.loads(content)) if content else ""
        return ""

    async def _receive(self, receive: Callable[[bytes, memoryview], None], last: asyncio.Future[_Message]) -> _Message:
        """Pass each message, as kind and content, to ``receive``, until ``last`` is done; return its result.

        The end of the stream counts as a `DIED` message without content.
        """

        def read() -> None:
            try:
                received = self._channel.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionError:
                received = b""
            self._frames.feed(received)
            while not last.done() and (message := self._frames.pop()) is not None:
                receive(message[:1], memoryview(message)[1:])
            if not received:
                receive(DIED, memoryview(b""))

        loop = asyncio.get_running_loop()
        # `add_reader` instead of `sock_recv`, which would wake a task for every message.
        loop.add_reader(self._channel, read)
        try:
            return await last
        finally:
            loop.remove_reader(self._channel)


_Message = tuple[bytes, memoryview]
"""The kind of a message, and its content."""


class _RunningCall:
    """One call in a worker: receives `STARTED`, then the outcome. Also enforces the deadline."""

    def __init__(self, call: Invocation, timeout: float | None, waited: Callable[[float], float]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[_Message] = loop.create_future()
        """The last message, or a `TimeoutError`."""
        self.timer = loop.call_later(_START_SECONDS, self._expire)
        self._call = call
        self._timeout = timeout
        self._waited = waited

    def receive(self, kind: bytes, content: memoryview) -> None:
        """Process a message."""
        if self.ended.done():
            return
        if kind != STARTED:
            self.ended.set_result((kind, content))
            return
        self.timer.cancel()
        self._call.started = time.monotonic()
        if self._timeout is not None:
            self._check_after(self._timeout)

    def _check_after(self, seconds: float) -> None:
        self.timer = self.ended.get_loop().call_later(seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        assert self._call.started is not None
        assert self._timeout is not None
        now = time.monotonic()
        left = self._call.started + self._timeout + self._waited(now) - now
        if left > 0:
            self._check_after(left)
        else:
            self._expire()

    def _expire(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(TimeoutError())


def _death(content: memoryview) -> str:
    """Return the error message of a worker that died, from its `Report`, which is empty if there is none."""
    if not content:
        return "lost its worker process, or none could be started"
    report: Report = pickle.loads(content)
    if report.memory_mb is not None:
        used = f"{report.memory_mb:.0f} MB, more than max_memory_mb={report.max_memory_mb}"
        return f"was killed: its worker process used {used}"
    if report.code >= 0:
        return f"ended its worker process with exit status {report.code}{_at(report)}"
    name = name_of(-report.code)
    hint = ", perhaps by the kernel because memory ran out" if name == "SIGKILL" else ""
    return f"crashed: its worker process was killed by {name}{hint}{_at(report)}"


def _at(report: Report) -> str:
    return f", at\n{report.stack}" if report.stack else ""
