"""A pool of worker processes for sync reward functions. A call past its deadline is killed with all its descendants.

Why no existing library: pebble kills a worker after its deadline, but only after a grace period of seconds and without
the worker's child processes, and it has no memory limit. anyio, loky and `concurrent.futures` have no deadlines. All
of them import the trainer's ``__main__`` again in a spawned child.

The pool (this module) starts a fork server (`reward_loop.processes.forkserver`), which forks the workers
(`reward_loop.processes.worker`). The pool sends calls to a worker by a `WorkerConnection`:

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
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from reward_loop._util.framing import FrameBuffer, frame
from reward_loop._util.process import ParentDeathPipe
from reward_loop._util.signals import name_of
from reward_loop._util.sockets import readable
from reward_loop.errors import FunctionLoadError, RewardCrashedError, RewardFunctionError
from reward_loop.processes.forkserver import DeathReport
from reward_loop.processes.outcome import CallOutcome
from reward_loop.processes.worker import CALL, DIED, ENDED, STARTED, Setup

_STOP_SECONDS = 5.0
"""Seconds for the fork server to stop with its workers."""
_START_SECONDS = 300.0
"""Seconds for a worker to import the function's module. Importing verl with torch can take 30 s on a busy machine."""
_REPORT_SECONDS = 5.0
"""Seconds to wait for the report on a killed worker."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    # Not `os.cpu_count`, which includes cores that cpusets or `taskset` exclude.
    return len(os.sched_getaffinity(0))


Begin = Callable[[asyncio.Future[Any]], None]
"""Starts the clock of the deadline. At the deadline, it sets a `TimeoutError` on the future: the worker is killed."""


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
        max_calls: the number of calls after which a process is replaced; by default never.

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
        max_calls: int | None = None,
    ) -> None:
        self.max_processes = max_processes or usable_cores()
        self.max_memory_mb = max_memory_mb
        try:
            setup = pickle.dumps(Setup(files or {}, cloudpickle.dumps(function), self.max_processes, max_calls))
        except Exception as error:
            raise FunctionLoadError(
                f"{name} cannot run in a worker process, because it cannot be pickled: {type(error).__name__}: "
                f"{error}. Create its locks, clients or models in the first call, or set isolation='thread'"
            ) from error
        self._function = function
        self._setup = frame(setup)
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._lock = threading.Lock()
        self._server: _ForkServerProcess | None = None
        self._idle: list[WorkerConnection] = []
        self._working = 0
        self._end: weakref.finalize[Any, Any] | None = None
        _pools.add(self)

    async def run(self, arguments: Mapping[str, Any], begin: Begin) -> CallOutcome:
        """Call the function in a process as soon as a slot is free.

        Args:
            arguments: the keyword arguments of the function.
            begin: called when the function starts.

        Raises:
            TimeoutError: the deadline passed. The message contains the stack of the user's code.
            RewardCrashedError: the process died during the call, or did not load the function in time.
        """
        try:
            content = _dumps(arguments)
        # Pickling runs code of the user's types, which may raise anything.
        except Exception as error:
            problem = f"has arguments that cannot be sent to a worker process: {type(error).__name__}: {error}"
            return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
        async with self._slots_here():
            while True:
                worker = self._idle.pop() if self._idle else self._start()
                self._working += 1
                try:
                    return await worker.call(content, begin)
                except DiedIdleError:
                    # The function has not started: this is not a repeated call, and does not count as one.
                    continue
                finally:
                    self._give_back(worker)

    def _give_back(self, worker: WorkerConnection) -> None:
        self._working -= 1
        if worker.usable:
            self._idle.append(worker)
        else:
            worker.close()

    def close(self) -> None:
        """Stop the idle processes, and the fork server if no call is in flight. A later call starts new ones."""
        while self._idle:
            self._idle.pop().close()
        # The end of the fork server kills its workers, also those of calls in flight.
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

    def _start(self) -> WorkerConnection:
        with self._lock:
            ours, theirs = _socket_pair()
            with theirs, contextlib.ExitStack() as unless_started:
                unless_started.callback(ours.close)
                if self._server is None or not self._server.fork(theirs):
                    self._end_server()
                    self._server = _ForkServerProcess(self.max_memory_mb)
                    # Must not refer to `self`, or the pool would never be deleted.
                    self._end = weakref.finalize(self, _end, self._server, self._idle)
                    self._server.fork(theirs)
                unless_started.pop_all()
        return WorkerConnection(ours, self._setup)

    def _forget(self) -> None:
        """Reset the state in a forked copy of this process: the worker processes belong to the original."""
        self._server, self._idle, self._working, self._slots = None, [], 0, None
        self._lock = threading.Lock()  # the old lock may be held by a thread that does not exist here
        if self._end is not None:
            # Otherwise the end of this process would stop the fork server of the original.
            self._end.detach()
        self._end = None


def _end(server: _ForkServerProcess, idle: list[WorkerConnection]) -> None:
    while idle:
        idle.pop().close()
    server.close()


_pools: weakref.WeakSet[WorkerProcesses] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


os.register_at_fork(after_in_child=_forget_all)


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

    async def call(self, content: bytes, begin: Begin) -> CallOutcome:
        """Run one call.

        Args:
            content: the pickled arguments.
            begin: called when the function starts.

        Raises:
            TimeoutError: the deadline passed. The message contains the stack of the user's code.
            RewardCrashedError: the worker died during the call, did not load the function in time, or sent an invalid
                message.
            DiedIdleError: the worker died before the call started, after it had completed an earlier one.
        """
        was_idle, self.usable = self.usable, False
        setup, self._setup = self._setup, b""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[bytes, memoryview]] = loop.create_future()
        started = False
        try:
            async with asyncio.timeout(_START_SECONDS) as loading:

                def start() -> None:
                    nonlocal started
                    started = True
                    # From here on, the deadline is that of the caller.
                    loading.reschedule(None)
                    begin(ended)

                loop.add_reader(self._channel, self._receive, ended, start)
                # The worker reads the arguments after loading the function, so sending may block until then.
                with contextlib.suppress(ConnectionError):  # the worker is dead; receiving will report it
                    await loop.sock_sendall(self._channel, setup + frame(CALL, content))
                kind, answer = await ended
        except TimeoutError:
            # Now: `_kill` waits with its own reader, and a socket has only one.
            loop.remove_reader(self._channel)
            at = await self._kill()
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
        return _unpack(answer)

    def close(self) -> None:
        """Close the connection; the fork server then kills the worker if it is alive."""
        # Shut down before closing: a forked copy of this process may hold a copy of the socket.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def _receive(self, ended: asyncio.Future[Any], start: Callable[[], None]) -> None:
        """Handle the messages that have arrived, until one of them ends the call."""
        try:
            is_open = self._read()
            while not ended.done() and (message := self._frames.pop()) is not None:
                kind, content = message[:1], memoryview(message)[1:]
                if kind == STARTED:
                    start()
                else:
                    ended.set_result((kind, content))
            if not is_open and not ended.done():
                ended.set_result((DIED, memoryview(b"")))
        # Otherwise the event loop would only log the error, and the call would never end.
        except Exception as error:
            if not ended.done():
                problem = f"sent a message from its worker process that failed: {type(error).__name__}: {error}"
                ended.set_exception(RewardCrashedError(problem))

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

    async def _kill(self) -> str:
        """Have the fork server kill the worker, wait for the report, and return the user's stack, or ``""``."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while True:
                    while (message := self._frames.pop()) is not None:
                        if message[:1] == DIED:
                            return _at(pickle.loads(memoryview(message)[1:]))
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


class _ForkServerProcess:
    """Starts and stops the fork server process of one pool."""

    def __init__(self, max_memory_mb: int | None) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._parent_death = ParentDeathPipe()
        self._control, theirs = _socket_pair()
        fds = (theirs.fileno(), self._parent_death.child_fd)
        # The path of this process: with `-c`, Python adds the working directory, and not the folder of the script.
        code = (
            f"import sys; sys.path[:] = {path!r}; from reward_loop.processes.forkserver import main; "
            f"main(*{fds!r}, {max_memory_mb!r})"
        )
        with theirs:
            # In its own session, so that Ctrl-C in the terminal does not reach it directly.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._parent_death.close_child_fd()

    def fork(self, channel: socket.socket) -> bool:
        """Request a worker that serves calls on ``channel``; return false if the fork server is dead."""
        try:
            socket.send_fds(self._control, [b"f"], [channel.fileno()])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop the fork server and its workers."""
        self._parent_death.close()
        self._control.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block, also if the program has called `socket.setdefaulttimeout`."""
    pair = socket.socketpair()
    # A default timeout makes a socket non-blocking, also in the process that inherits it.
    for end in pair:
        end.setblocking(True)
    return pair


def _dumps(arguments: Any) -> bytes:
    """Pickle with `pickle`, or by value with `cloudpickle` if the content refers to ``__main__``.

    A worker does not have this process's ``__main__`` module.
    """
    with contextlib.suppress(Exception):
        # If a text contains this name, `cloudpickle` is only slower.
        if b"__main__" not in (content := pickle.dumps(arguments)):
            return content
    return cloudpickle.dumps(arguments)


def _unpack(answer: bytes | memoryview) -> CallOutcome:
    """Return the outcome that a worker has sent, see `worker.py`."""
    content, seconds, error, remote = pickle.loads(answer)
    found = None
    try:
        if content is not None:
            found = pickle.loads(content)
    except Exception as failure:
        error = RewardFunctionError(f"returned a value that cannot be unpickled ({type(failure).__name__}: {failure})")
    if remote is None:
        return CallOutcome(found, None, seconds, error)
    if not isinstance(found, BaseException):
        return CallOutcome(None, remote, seconds)
    try:
        found.__cause__ = remote
    except Exception:  # a frozen dataclass
        return CallOutcome(None, remote, seconds)
    return CallOutcome(None, found, seconds)
