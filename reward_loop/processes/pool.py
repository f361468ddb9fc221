"""A pool of processes for sync reward functions. A call past its deadline is killed with all its descendants.

Why no existing library: pebble kills a worker after its deadline, but only after a grace period of seconds and without
the worker's child processes, and it has no memory limit. anyio, loky and `concurrent.futures` have no deadlines. All
of them import the trainer's ``__main__`` again in a spawned child, or fork one that others have used.

The pool (this module) starts a template (`reward_loop.processes.template`), which loads the function once and forks the
children (`reward_loop.processes.child`). They are forked before their call, so that the fork takes none of its time:

==================  ======================================================================================
State of a child    Next
==================  ======================================================================================
idle                Receives a call, and sends `STARTED`; or is closed by the pool
running a call      `ENDED`: idle. `ENDED_LAST`, death, timeout or cancellation: closed
closed              The template kills the process
==================  ======================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle

from reward_loop._util.process import ParentDeathPipe
from reward_loop._util.signals import name_of
from reward_loop.errors import FunctionLoadError, RewardCrashedError, RewardFunctionError
from reward_loop.processes.child import CALL, ENDED, HEADER, STARTED, Setup, message
from reward_loop.processes.outcome import CallOutcome

_STOP_SECONDS = 5.0
"""Seconds for the template to stop with its children."""
_START_SECONDS = 300.0
"""Seconds for importing the function's module. Importing verl with torch can take 30 s on a busy machine."""
_GRACE_SECONDS = 2.0
"""Seconds after its deadline in which a child must have ended itself. On a busy machine it may not run at once."""
_NOT_LOADED = "was not loaded in a worker process within {:g} s"
_STACK_LINES = 8
_READ_BYTES = 1 << 20


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    # Not `os.cpu_count`, which includes cores that cpusets or `taskset` exclude.
    return len(os.sched_getaffinity(0))


class WorkerProcesses:
    """Runs at most ``max_processes`` calls of one function at a time, each in its own process.

    A process is killed with its descendants if its call passes the deadline, is cancelled or exceeds the memory limit,
    or if the parent process dies or this object is deleted.

    Args:
        function: the function of all calls; an object or a class with a method ``compute_score``, or a callable one. It
            is pickled by module and name, or by value if it cannot be imported.
        constructor: the arguments with which the template makes the object of a class.
        name: the function's name in messages.
        files: modules loaded from files, which cannot be imported by name alone: name -> path.
        max_processes: the maximum number of concurrent calls; by default the number of cores.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its descendants; by default none.
        calls_per_process: the number of calls of a process, which is forked with the function loaded. ``None``: each
            process loads the function itself, and runs calls until it is killed.

    Raises:
        FunctionLoadError: the function cannot be pickled.
    """

    def __init__(
        self,
        function: Any,
        constructor: Mapping[str, Any] | None = None,
        *,
        name: str,
        files: Mapping[str, str] | None = None,
        max_processes: int | None = None,
        max_memory_mb: int | None = None,
        calls_per_process: int | None = 1,
    ) -> None:
        self.max_processes = max_processes or usable_cores()
        self.max_memory_mb = max_memory_mb
        self._name = name
        self._calls = calls_per_process
        try:
            content = cloudpickle.dumps((function, dict(constructor or {})))
        except Exception as error:
            raise FunctionLoadError(
                f"{name} cannot run in a worker process, because it cannot be pickled: {type(error).__name__}: "
                f"{error}. Give the class and not its object, create locks, clients or models when the module is "
                "imported, or set isolation='thread'"
            ) from error
        self._setup = pickle.dumps(Setup(name, files or {}, content, calls_per_process, max_memory_mb))
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._template: _TemplateProcess | None = None

    async def run(
        self, arguments: Mapping[str, Any], *, key: str, timeout: float | None, begin: Callable[[], None]
    ) -> CallOutcome:
        """Call the function in a process as soon as a slot is free.

        Args:
            arguments: the keyword arguments of the function.
            key: the seed of the random generators of the process.
            timeout: seconds from the start of the function to its deadline.
            begin: called when the function starts.

        Raises:
            TimeoutError: the deadline passed. The message contains the stack of the user's code.
            RewardCrashedError: the process died during the call, or did not load the function in time.
        """
        try:
            # By value where the content is of `__main__`, which a child does not have.
            content = pickle.dumps((timeout, key, cloudpickle.dumps(arguments)))
        # Pickling runs code of the user's types, which may raise anything.
        except Exception as error:
            problem = f"has arguments that cannot be sent to a worker process: {type(error).__name__}: {error}"
            return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
        call = message(CALL, content)
        # A semaphore belongs to one event loop; this object may be used in several, one after another.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.max_processes)
        async with self._slots[1]:
            # A child that dies before its call has nothing to do with it: perhaps memory had run out.
            with contextlib.suppress(_NotStartedError):
                return await self._call(call, timeout, begin)
            try:
                return await self._call(call, timeout, begin)
            except _NotStartedError as error:
                raise RewardCrashedError(error.problem) from None

    async def _call(self, call: bytes, timeout: float | None, begin: Callable[[], None]) -> CallOutcome:
        template = self._started()
        child = template.idle.pop() if template.idle else template.fork()
        template.working += 1
        try:
            self._fill(template)
            return await child.call(call, timeout, begin)
        except RewardCrashedError:
            if not child.has_started and self._template is template:
                self._template = None  # it may be dead, or hang in an import; the next call starts another one
            raise
        finally:
            template.working -= 1
            if child.is_usable:
                template.idle.append(child)
            else:
                child.close()
            if template is self._template:
                self._fill(template)
            elif not template.working:
                await asyncio.to_thread(template.end)

    def load(self) -> None:
        """Wait until a process has loaded the function.

        Raises:
            FunctionLoadError: it has not: for instance, the constructor of a class has raised an exception.
        """
        template = self._started()
        child = template.fork()
        # In a thread: this one may have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            try:
                loading = child.call(message(CALL), None, lambda: None)
                error = thread.submit(asyncio.run, loading).result().error
            except RewardCrashedError as crash:
                error = crash
            except BaseException:
                child.close()  # at Ctrl-C, the thread ends with the connection
                raise
        template.idle.append(child)
        if error is not None:
            self.close()
            raise FunctionLoadError(f"{self._name} {error.problem}")

    def _started(self) -> _TemplateProcess:
        """Return the template, which is started if none runs."""
        if self._template is None or not self._template.is_running():
            self.close()
            # The finalizer must not refer to `self`, or the pool would never be deleted.
            self._template = _TemplateProcess(self._setup)
            self._template.end = weakref.finalize(self, self._template.close)
        return self._template

    def _fill(self, template: _TemplateProcess) -> None:
        """Fork a child for each free slot, so that the next calls do not wait for it."""
        # In the null form, a process costs the import of the function: none is started before it is needed.
        while self._calls is not None and len(template.idle) + template.working < self.max_processes:
            template.idle.append(template.fork())

    def close(self) -> None:
        """Stop the idle processes, and the template when the last call in flight has ended. A later call starts new."""
        template, self._template = self._template, None
        if template is not None and not template.working:
            template.end()


class _NotStartedError(RewardCrashedError):
    """A child died before its call had started."""


class _TemplateProcess:
    """Starts and stops the template process of one pool, and keeps its idle children."""

    end: weakref.finalize[Any, Any]
    """Calls `close`, once."""

    def __init__(self, setup: bytes) -> None:
        self.idle: list[_Child] = []
        self.working = 0
        """The number of calls in flight. A template that is not that of its pool any more ends with the last one."""
        self._owner = os.getpid()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._parent_death = ParentDeathPipe()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(True)  # the program may have called `socket.setdefaulttimeout`
        with theirs, open(os.memfd_create("reward-function"), "wb", buffering=0) as file:
            file.write(setup)
            fds = (theirs.fileno(), self._parent_death.child_fd, file.fileno())
            # The path of this process: with `-m`, Python adds the working directory, and not the folder of the script.
            code = (
                f"import sys; sys.path[:] = {path!r}; from reward_loop.processes.template import main; main(*{fds!r})"
            )
            # In its own session, so that Ctrl-C in the terminal does not reach it directly.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._parent_death.close_child_fd()

    def is_running(self) -> bool:
        """Return whether this process, and not one from which it was forked, has a template that runs."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self) -> _Child:
        """Request a child."""
        ours, theirs = socket.socketpair()
        child = _Child(ours, os.memfd_create("reward-function-report"))
        # If the template is dead, the child's connection ends at once.
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"f"], [theirs.fileno(), child.report_fd])
        return child

    def close(self) -> None:
        """Stop the template and its children, unless they are those of the process from which this one was forked."""
        if self._owner != os.getpid():
            return
        while self.idle:
            self.idle.pop().close()
        self._parent_death.close()
        self._control.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()


class _Child:
    """Runs calls in one child, one at a time.

    Args:
        connection: the pool's end of the socket pair.
        report_fd: the file in which the child and the template write how it ended.
    """

    def __init__(self, connection: socket.socket, report_fd: int) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.report_fd = report_fd
        self.has_started = False
        """Whether the last call has started."""
        self.is_usable = False
        """Whether the last call has ended, and the child serves another one."""

    async def call(self, call: bytes, timeout: float | None, begin: Callable[[], None]) -> CallOutcome:
        """Run one call; see `WorkerProcesses.run`.

        Raises:
            _NotStartedError: the child died before the call.
        """
        self.is_usable = self.has_started = False
        loop = asyncio.get_running_loop()
        is_late = False
        # At the end of the connection, the child is dead, and the report says why.
        with contextlib.suppress(EOFError, ConnectionError):
            try:
                async with asyncio.timeout(_START_SECONDS) as deadline:
                    await loop.sock_sendall(self._connection, call)
                    while True:
                        kind, length = HEADER.unpack(await self._receive(loop, HEADER.size))
                        if kind != STARTED:
                            outcome = _unpack(await self._receive(loop, length))
                            self.is_usable = kind == ENDED
                            return outcome
                        self.has_started = True
                        begin()
                        # The child ends itself at the deadline, unless it cannot.
                        deadline.reschedule(None if timeout is None else loop.time() + timeout + _GRACE_SECONDS)
            except TimeoutError:
                is_late = True
        report = self._report()
        if not self.has_started:
            raise (
                RewardCrashedError(_NOT_LOADED.format(_START_SECONDS)) if is_late else _NotStartedError(_death(report))
            )
        if is_late or report.startswith("Timeout"):  # the first line that `faulthandler` writes at the deadline
            raise TimeoutError(_at(report))
        raise RewardCrashedError(_death(report))

    async def _receive(self, loop: asyncio.AbstractEventLoop, length: int) -> bytearray:
        """Wait for some bytes.

        Raises:
            EOFError, ConnectionError: the connection has ended.
        """
        received = bytearray()
        while len(received) < length:
            part = await loop.sock_recv(self._connection, min(length - len(received), _READ_BYTES))
            if not part:
                raise EOFError
            received += part
        return received

    def _report(self) -> str:
        return os.pread(self.report_fd, 1 << 16, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the connection; the template then kills the child if it is alive."""
        # Shut down before closing: a forked copy of this process may hold a copy of the socket.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        os.close(self.report_fd)


def _death(report: str) -> str:
    """Return the error message of a child that died, from its report."""
    found = re.search(r"^ended with (-?\d+), memory (\S+)$", report, re.MULTILINE)
    if found is None:
        return "lost its worker process, or none could be started"
    if found[2] != "None":
        return f"was killed: its worker process used {float(found[2]):.0f} MB, more than max_memory_mb allows"
    if (code := int(found[1])) >= 0:
        return f"ended its worker process with exit status {code}{_at(report)}"
    name = name_of(-code)
    hint = ", perhaps by the kernel because memory ran out, or for its CPU time" if name == "SIGKILL" else ""
    return f"crashed: its worker process was killed by {name}{hint}{_at(report)}"


_OURS = f'"{Path(__file__).parent}{os.sep}'
"""Marks the lines of this package in a stack. The lines of the user's code come before them."""


def _at(report: str) -> str:
    """Return the user's lines of the main thread's stack, innermost first; ``""`` if there are none."""
    lines: list[str] = []
    # The main thread is the last one that `faulthandler` writes.
    for line in re.findall(r"^ +File .*$", report.rpartition("(most recent call first)")[2], flags=re.MULTILINE):
        if _OURS in line:
            break
        lines.append(line)
    return ", at\n" + "\n".join(lines[:_STACK_LINES]) if lines else ""


def _unpack(answer: bytes | bytearray) -> CallOutcome:
    """Return the outcome that a child has sent."""
    try:
        outcome, original = pickle.loads(answer)
    except Exception as failure:  # of a class that this process does not have
        problem = f"returned a value that cannot be unpickled ({type(failure).__name__}: {failure})"
        return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
    # The class of the original may not exist here, or allow no cause.
    with contextlib.suppress(Exception):
        exception = pickle.loads(original)
        exception.__cause__ = outcome.exception
        outcome.exception = exception
    return outcome
