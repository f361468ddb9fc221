"""A pool of worker processes for sync reward functions. A call past its deadline is killed with all its descendants.

Why no existing library: pebble kills a worker after its deadline, but only after a grace period of seconds and without
the worker's child processes, and it has no memory limit. anyio, loky and `concurrent.futures` have no deadlines. All
of them import the trainer's ``__main__`` again in a spawned child.

Lifecycle of a worker, as the pool sees it:

=================  ====================================================================================
State              Next
=================  ====================================================================================
starting           Receives the setup and the first arguments; must send `STARTED` in `_START_SECONDS`
running a call     `ENDED`: idle. `ENDED_LAST`, `DIED`, timeout or cancellation: closed
idle               Receives the next call, or is closed by `WorkerProcesses.close`
closed             The fork server kills the process; the next call starts another one
=================  ====================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from reward_loop._util.parent_death_pipe import Lifeline
from reward_loop.errors import FunctionLoadError, RewardCrashedError, RewardFunctionError
from reward_loop.processes.forkserver import Report
from reward_loop.processes.invocation import CallOutcome, Invocation
from reward_loop.processes.worker import CALL, DIED, ENDED, HEADER, STARTED, Setup, unpack

__all__ = ["WorkerProcesses", "usable_cores"]

_START_SECONDS = 300.0
"""Seconds for a worker to import the function's module. Importing verl with torch can take 30 s on a busy machine."""
_REPORT_SECONDS = 5.0
"""Seconds to wait for the report on a killed worker."""
_STOP_SECONDS = 5.0


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class WorkerProcesses:
    """Runs at most ``max_processes`` calls of one function at a time, each in its own worker process.

    Processes are reused for later calls. A process is killed with its descendants if its call passes the deadline, is
    cancelled or exceeds the memory limit, or if the parent process dies or this object is deleted. The next call
    starts a replacement. A small fork server (`reward_loop.processes.forkserver`) forks the processes, which import
    only what the function needs.

    Args:
        function: the function of all calls. It is pickled by module and name, or by value if it cannot be imported.
        name: the function's name in messages.
        files: modules loaded from files, which cannot be imported by name alone: name -> path.
        max_processes: the maximum number of concurrent calls; by default the number of cores.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its descendants; by default none.

    Raises:
        FunctionLoadError: the function cannot be pickled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        files: Mapping[str, str] | None = None,
        max_processes: int | None = None,
        max_memory_mb: int | None = None,
    ) -> None:
        self.max_processes = max_processes or usable_cores()
        self.max_memory_mb = max_memory_mb
        try:
            setup = pickle.dumps(Setup(files or {}, cloudpickle.dumps(function), self.max_processes))
        except Exception as error:
            raise FunctionLoadError(
                f"{name} cannot run in a process of its own, as it cannot be pickled: {type(error).__name__}: {error}. "
                "Make what it holds (locks, clients, models) when it is first called, or run it in threads"
            ) from error
        self._function = function
        self._setup = _framed(setup)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._lock = threading.Lock()
        self._server: _ForkServerProcess | None = None
        self._idle: list[_Worker] = []
        self._working = 0
        self._end: weakref.finalize[Any, Any] | None = None
        _pools.add(self)

    async def run(
        self,
        call: Invocation,
        timeout: float | None = None,
        waited: Callable[[float], float] = lambda now: 0.0,
        context: Any = None,
    ) -> CallOutcome:
        """Call the function in a process as soon as a slot is free.

        Args:
            call: the function with its keyword arguments; its ``started`` is set when the function starts.
            timeout: seconds from the start of the function to its deadline; ``None`` for no deadline.
            waited: returns the seconds of waiting up to the given `time.monotonic` that do not count towards the
                deadline.
            context: the value of `worker.context` during the call.

        Raises:
            TimeoutError: the deadline passed. The message contains the stack of the user's code.
            RewardCrashedError: the process died during the call, or did not load the function in time.
        """
        assert call.function is self._function
        assert not call.args
        try:
            arguments = _framed(_dumps((context, call.kwargs)))
        except Exception as error:
            problem = f"cannot be sent its arguments: {type(error).__name__}: {error}"
            return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
        async with self._slots_here():
            while True:
                worker = self._idle.pop() if self._idle else self._start()
                self._working += 1
                try:
                    return await worker.call(call, arguments, timeout, waited)
                except _DiedIdleError:
                    continue
                finally:
                    self._working -= 1
                    if worker.usable:
                        self._idle.append(worker)
                    else:
                        worker.close()

    def close(self) -> None:
        """Stop the idle processes, and the fork server if no call is in flight. A later call starts new ones."""
        while self._idle:
            self._idle.pop().close()
        if not self._working:
            self._end_server()

    def _end_server(self) -> None:
        if self._end is not None:
            self._end()
        self._server = None

    def _slots_here(self) -> asyncio.Semaphore:
        # A semaphore belongs to one event loop; this object may be used in several, one after another.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.max_processes))
        return self._slots[1]

    def _start(self) -> _Worker:
        with self._lock:
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as unless_started:
                unless_started.callback(ours.close)
                if self._server is None or not self._server.fork(theirs):
                    self._end_server()
                    self._server = _ForkServerProcess(self.max_memory_mb)
                    self._end = weakref.finalize(self, _end, self._server, self._idle)
                    self._server.fork(theirs)
                unless_started.pop_all()
        return _Worker(ours, self._setup)

    def _forget(self) -> None:
        """Reset the state in a forked copy of this process: the worker processes belong to the original."""
        self._server, self._idle, self._working, self._slots = None, [], 0, None
        self._lock = threading.Lock()  # the old lock may be held by a thread that does not exist here
        if self._end is not None:
            self._end.detach()
        self._end = None


def _end(server: _ForkServerProcess, idle: list[_Worker]) -> None:
    while idle:
        idle.pop().close()
    server.close()


_pools: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)


class _ForkServerProcess:
    """Starts and stops the fork server process of one pool."""

    def __init__(self, max_memory_mb: int | None) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._lifeline = Lifeline()
        self._control, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._lifeline.child_fd)
        code = (
            f"import sys; sys.path[:] = {path!r}; from reward_loop.processes.forkserver import main; "
            f"main(*{fds!r}, {max_memory_mb!r})"
        )
        with theirs:
            # In its own session, so that Ctrl-C in the terminal does not reach it directly.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._lifeline.release()

    def fork(self, channel: socket.socket) -> bool:
        """Request a worker that serves calls on ``channel``; return false if the fork server is dead."""
        try:
            socket.send_fds(self._control, [b"f"], [channel.fileno()])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop the fork server and its workers."""
        self._lifeline.cut()
        self._control.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _DiedIdleError(Exception):
    """A worker died while it was idle, so the next call did not start."""


class _Worker:
    """The pool's connection to one worker process."""

    def __init__(self, channel: socket.socket, setup: bytes) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._setup = setup
        self._received = bytearray()
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
            _DiedIdleError: the worker died before the call started, after it had completed an earlier one.
        """
        was_idle, self.usable = self.usable, False
        setup, self._setup = self._setup, b""
        loop = asyncio.get_running_loop()
        answer: _Answer | None = None
        call.started = None
        try:
            # The worker reads the arguments after loading the function, so sending may block until then.
            async with asyncio.timeout(_START_SECONDS):
                with contextlib.suppress(ConnectionError):  # the worker is dead; reading will report it
                    await loop.sock_sendall(self._channel, setup + arguments)
            answer = _Answer(call, loop, timeout, waited)
            # `add_reader` instead of `sock_recv`, which would wake a task for every frame.
            loop.add_reader(self._channel, self._read, answer)
            try:
                kind, content = await answer.ended
            finally:
                answer.timer.cancel()
                loop.remove_reader(self._channel)
        except TimeoutError:
            at = await self._give_up()
            if call.started is None:
                raise RewardCrashedError(f"was not loaded in a process within {_START_SECONDS:g} s{at}") from None
            raise TimeoutError(at) from None
        if kind == DIED:
            if was_idle and call.started is None:
                raise _DiedIdleError
            raise RewardCrashedError(_death(content))
        self.usable = kind == ENDED
        return unpack(content)

    def close(self) -> None:
        """Close the connection; the fork server then kills the worker if it is alive."""
        # Shut down before closing: a forked copy of this process may hold a copy of the socket.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    async def _give_up(self) -> str:
        """Have the fork server kill the worker, wait for the report, and return the user's stack, or ``""``."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while True:
                    kind, content = await self._next()
                    if kind == DIED:
                        return _at(pickle.loads(content)) if content else ""
        return ""

    def _read(self, answer: _Answer) -> None:
        """Read the received bytes, and pass complete frames to ``answer``."""
        try:
            received = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        self._received += received
        while not answer.ended.done() and (frame := self._frame()) is not None:
            answer.heard(*frame)
        if not received:
            answer.heard(DIED, b"")

    async def _next(self) -> tuple[bytes, bytes]:
        """Return the next frame. The end of the stream counts as a `DIED` frame without content."""
        loop = asyncio.get_running_loop()
        while (frame := self._frame()) is None:
            try:
                received = await loop.sock_recv(self._channel, 1 << 16)
            except ConnectionError:
                received = b""
            if not received:
                return DIED, b""
            self._received += received
        return frame

    def _frame(self) -> tuple[bytes, bytes] | None:
        if len(self._received) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._received)
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        content = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return kind, content


class _Answer:
    """Processes a worker's frames about one call: first `STARTED`, then the outcome. Also enforces the deadline."""

    def __init__(
        self,
        call: Invocation,
        loop: asyncio.AbstractEventLoop,
        timeout: float | None,
        waited: Callable[[float], float],
    ) -> None:
        self.ended: asyncio.Future[tuple[bytes, bytes]] = loop.create_future()
        """The last frame, or a `TimeoutError`."""
        self._call = call
        self.timer = loop.call_later(_START_SECONDS, self._expire)
        self._timeout = timeout
        self._waited = waited

    def heard(self, kind: bytes, content: bytes) -> None:
        """Process a frame."""
        if self.ended.done():
            return
        if kind != STARTED:
            self.ended.set_result((kind, content))
            return
        self.timer.cancel()
        self._call.started = time.monotonic()
        if self._timeout is not None:
            self._look_in(self._timeout)

    def _look_in(self, seconds: float) -> None:
        self.timer = self.ended.get_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        assert self._call.started is not None
        assert self._timeout is not None
        now = time.monotonic()
        left = self._call.started + self._timeout + self._waited(now) - now
        if left > 0:
            self._look_in(left)
        else:
            self._expire()

    def _expire(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(TimeoutError())


def _dumps(arguments: Any) -> bytes:
    """Pickle with `pickle`, or by value with `cloudpickle` if the content refers to ``__main__``.

    A worker does not have this process's ``__main__`` module.
    """
    with contextlib.suppress(Exception):
        if b"__main__" not in (content := pickle.dumps(arguments)):
            return content
    return cloudpickle.dumps(arguments)


def _framed(content: bytes) -> bytes:
    return HEADER.pack(CALL, len(content)) + content


def _death(content: bytes) -> str:
    if not content:
        return "lost its process, or could not get one"
    report: Report = pickle.loads(content)
    if report.memory_mb is not None:
        return f"was killed: its process had {report.memory_mb:.0f} MB, and max_memory_mb is {report.max_memory_mb}"
    if report.code >= 0:
        return f"ended its process with exit status {report.code}{_at(report)}"
    name = signal.Signals(-report.code).name
    hint = ", perhaps by the kernel for want of memory" if name == "SIGKILL" else ""
    return f"had its process ended by {name}{hint}{_at(report)}"


def _at(report: Report) -> str:
    return f", at\n{report.stack}" if report.stack else ""
