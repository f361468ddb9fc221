"""A pool of processes for sync reward functions. A call past its deadline is killed with all its descendants.

Why no existing library: pebble kills a worker after its deadline, but only after a grace period of seconds and without
the worker's child processes, and it has no memory limit. anyio, loky and `concurrent.futures` have no deadlines. All
of them import the trainer's ``__main__`` again in a spawned child, or fork one that others have used.

The pool (this module) starts a template (`reward_loop.processes.template`), which loads the function once and forks the
children (`reward_loop.processes.child`). They are forked before their call, so that the fork takes none of its time:

==================  ======================================================================================
State of a child    Next
==================  ======================================================================================
idle                Receives a call, and says that it has started; or is closed by the pool
running a call      Sends the outcome: idle. The last outcome, death, timeout or cancellation: closed
closed              The template kills the process
==================  ======================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle

from reward_loop._util.process import ParentDeathPipe, descendants, kill
from reward_loop._util.signals import name_of
from reward_loop.errors import FunctionLoadError, RewardCrashedError, RewardFunctionError
from reward_loop.processes.child import HEADER, Setup
from reward_loop.processes.outcome import CallOutcome

_STOP_SECONDS = 5.0
"""Seconds for the template to stop with its children."""
_START_SECONDS = 300.0
"""Seconds for importing the function's module. Importing verl with torch can take 30 s on a busy machine."""
_GRACE_SECONDS = 2.0
"""Seconds after its deadline in which a child must have ended itself. On a busy machine it may not run at once."""
_CLOSED = "was ended: it was closed before the call had ended"
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
        self._setup = pickle.dumps(Setup(name, files or {}, content, calls_per_process, max_memory_mb, _START_SECONDS))
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._template: _TemplateProcess | None = None
        self._closes = 0

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
            RewardCrashedError: the process died during the call, or did not load the function in time; or `close` was
                called.
        """
        try:
            # By value where the content is of `__main__`, which a child does not have.
            call = pickle.dumps((timeout, key, cloudpickle.dumps(arguments)))
        # Pickling runs code of the user's types, which may raise anything.
        except Exception as error:
            problem = f"has arguments that cannot be sent to a worker process: {type(error).__name__}: {error}"
            return CallOutcome(None, None, 0.0, RewardFunctionError(problem))
        # A semaphore belongs to one event loop; this object may be used in several, one after another.
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.max_processes)
        closes = self._closes
        async with self._slots[1]:
            for attempt in (1, 2):
                try:
                    if closes == self._closes:  # a call that has waited must not start a new template
                        return await self._call(call, timeout, begin)
                except RewardCrashedError as error:
                    # Once again if it has nothing to do with the call: perhaps memory had run out.
                    is_last = attempt == 2 or not isinstance(error, _NotStartedError)
                    if closes == self._closes and is_last:
                        raise
        raise RewardCrashedError(_CLOSED)

    async def _call(self, call: bytes, timeout: float | None, begin: Callable[[], None]) -> CallOutcome:
        template = self._started()
        child = template.idle.pop() if template.idle else template.fork()
        try:
            return await child.call(call, timeout, begin)
        except _NotStartedError as error:
            if isinstance(error, _HangsError):
                template.give_up(error.problem)
            if template.problem:  # as for the other calls that waited for it
                raise RewardCrashedError(template.problem) from None
            raise
        finally:
            if template is self._template and child.is_usable:
                template.idle.append(child)
            else:
                child.close()
                if template is self._template:
                    self._fork_ahead(template)

    def load(self) -> None:
        """Wait until a process has loaded the function.

        Raises:
            FunctionLoadError: it has not: for instance, the constructor of a class has raised an exception.
        """
        # In a thread: this one may have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(asyncio.run, self._call(pickle.dumps(None), None, lambda: None))
            try:
                error = loading.result().error
            except RewardCrashedError as crash:
                error = crash
            except BaseException:
                self.close()  # at Ctrl-C, the thread ends with the template
                raise
        if error is not None:
            self.close()
            raise FunctionLoadError(f"{self._name} {error.problem}")

    def _started(self) -> _TemplateProcess:
        """Return the template, which is started if none runs."""
        if self._template is None or not self._template.is_running():
            self._end()
            self._template = _TemplateProcess(self._setup)
            # The finalizer must not refer to `self`, or the pool would never be deleted.
            self._template.end = weakref.finalize(self, self._template.close)
            for _ in range(self.max_processes):
                self._fork_ahead(self._template)
        return self._template

    def _fork_ahead(self, template: _TemplateProcess) -> None:
        """Fork a child for a free place, so that the next call does not wait for it."""
        if self._calls is not None:  # in the null form, a process costs the import of the function
            template.idle.append(template.fork())

    def close(self) -> None:
        """Stop the template with its processes: calls in flight fail. A later call starts a new one."""
        self._closes += 1
        self._end()

    def _end(self) -> None:
        # First `None`: another thread may run the event loop with the calls.
        template, self._template = self._template, None
        if template is not None:
            template.end()


class _NotStartedError(RewardCrashedError):
    """A child died before its call had started."""


class _HangsError(_NotStartedError):
    """A child has neither started its call nor ended itself: the template does not fork it."""


class _TemplateProcess:
    """Starts and stops the template process of one pool, and keeps its idle children."""

    end: weakref.finalize[Any, Any]
    """Calls `close`, once."""
    problem = ""
    """The error of the calls that waited for it, if it hung and was killed."""

    def __init__(self, setup: bytes) -> None:
        self.idle: list[_Child] = []
        self._owner = os.getpid()
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._parent_death = ParentDeathPipe()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(True)  # the program may have called `socket.setdefaulttimeout`
        self._setup_fd = os.memfd_create("reward-function")
        self._stack_at = os.write(self._setup_fd, setup)  # behind it, `faulthandler` writes the stack of the template
        with theirs:
            fds = (theirs.fileno(), self._parent_death.child_fd, self._setup_fd)
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

    def give_up(self, problem: str) -> None:
        """Kill the template, which hangs, with all processes that it has started."""
        if self.problem or not self.is_running():
            return
        started = descendants(self._process.pid)
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        for pid in started[1:]:
            kill(pid)
        self.problem = problem + _at(os.pread(self._setup_fd, 1 << 16, self._stack_at).decode(errors="replace"))

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
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
                self._process.wait(_STOP_SECONDS)
        os.close(self._setup_fd)


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
        self.is_usable = False
        """Whether the last call has ended, and the child serves another one."""

    async def call(self, call: bytes, timeout: float | None, begin: Callable[[], None]) -> CallOutcome:
        """Run one call; see `WorkerProcesses.run`.

        Raises:
            _NotStartedError: the child died before the call, or there was none.
        """
        self.is_usable = has_started = is_late = False
        loop = asyncio.get_running_loop()
        # At the end of the connection, the child is dead, and the report says why.
        with contextlib.suppress(EOFError, ConnectionError):
            try:
                async with asyncio.timeout(_START_SECONDS + _GRACE_SECONDS) as deadline:
                    await loop.sock_sendall(self._connection, call)
                    while True:
                        is_last, length = HEADER.unpack(await self._receive(loop, HEADER.size))
                        if length:
                            outcome = _unpack(await self._receive(loop, length))
                            self.is_usable = not is_last
                            return outcome
                        has_started = True
                        begin()
                        # The child ends itself at the deadline, unless it cannot.
                        deadline.reschedule(None if timeout is None else loop.time() + timeout + _GRACE_SECONDS)
            except TimeoutError:
                is_late = True
        report = os.pread(self.report_fd, 1 << 16, 0).decode(errors="replace")
        has_ended_itself = report.startswith("Timeout")  # the first line that `faulthandler` writes at the deadline
        if not has_started and (is_late or has_ended_itself):
            kind = _HangsError if is_late else RewardCrashedError
            raise kind(f"was not loaded in a worker process within {_START_SECONDS:g} s{_at(report)}")
        if not has_started:
            raise _NotStartedError(_death(report), cause=RewardCrashedError.__name__)
        if is_late or has_ended_itself:
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
    stack = report.rpartition("(most recent call first)")[2]
    for line in re.findall(r'^ +File "(?!<frozen importlib).*$', stack, flags=re.MULTILINE):
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
