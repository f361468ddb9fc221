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

from reward_loop._util.framing import FrameBuffer
from reward_loop._util.signals import name_of
from reward_loop._util.sockets import readable
from reward_loop.errors import RewardCrashedError
from reward_loop.processes.forkserver import Report
from reward_loop.processes.invocation import CallOutcome, Invocation, WaitClock
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

    async def call(self, call: Invocation, arguments: bytes, timeout: float | None, waited: WaitClock) -> CallOutcome:
        """Run one call.

        Args:
            call: the call; only its ``started`` is used, and set.
            arguments: the frame with the arguments.
            timeout: seconds from the start of the function to its deadline.
            waited: the seconds that the call has waited for limits.

        Raises:
            TimeoutError: the deadline passed.
            RewardCrashedError: the worker died during the call, or did not load the function in time.
            DiedIdleError: the worker died before the call started, after it had completed an earlier one.
        """
        was_idle, self.usable = self.usable, False
        setup, self._setup = self._setup, b""
        call.started = None
        try:
            async with asyncio.timeout(_START_SECONDS):
                # The worker reads the arguments after loading the function, so sending may block until then.
                with contextlib.suppress(ConnectionError):  # the worker is dead; receiving will report it
                    await asyncio.get_running_loop().sock_sendall(self._channel, setup + arguments)
                kind, content = await self._receive()
            if kind == STARTED:
                call.started = time.monotonic()
                kind, content = await self._receive_by(call.started, timeout, waited)
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                kind, content = await self._receive()
                while kind != DIED:
                    kind, content = await self._receive()
                return _at(pickle.loads(content)) if content else ""
        return ""

    async def _receive_by(self, started: float, timeout: float | None, waited: WaitClock) -> tuple[bytes, memoryview]:
        """Return the next message, as `_receive` does.

        Raises:
            TimeoutError: the deadline of the call, which started at ``started``, has passed.
        """
        if timeout is None:
            return await self._receive()
        now = started
        while (left := started + timeout + waited(now) - now) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self._receive()
            now = time.monotonic()
        raise TimeoutError

    async def _receive(self) -> tuple[bytes, memoryview]:
        """Return the kind and the content of the next message. The end of the stream is a `DIED` without content."""
        while (message := self._frames.pop()) is None:
            await readable(self._channel)
            # `sock_recv` would lose what it has received if it is cancelled, as at a deadline that is then extended.
            try:
                received = self._channel.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionError:
                received = b""
            if not received:
                return DIED, memoryview(b"")
            self._frames.feed(received)
        return message[:1], memoryview(message)[1:]


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
