"""The fork server of one pool: a small, single-threaded process that forks, monitors and kills the workers.

It is a separate process because neither side can do its work. The trainer has threads, so it must not fork. A worker
may hold the GIL indefinitely (for instance in a regular expression), so it cannot enforce its own deadline.

========================================  ============================================================================
Event                                     Reaction
========================================  ============================================================================
The pool sends one end of a socket pair   Fork a worker that serves calls on it (`reward_loop.processes.worker`)
The pool shuts down writing on its end    The call timed out: request the worker's stack, then kill the worker
The pool shuts down both directions       Kill the worker at once
A worker exceeds ``max_memory_mb``        Kill the worker
A worker dies for any reason              Kill its descendants, then send a `DeathReport` on its socket
The pool's process dies (pipe closes)     Kill all workers and exit
========================================  ============================================================================

Invariant: no descendant of a worker survives it. A worker is a subreaper (``PR_SET_CHILD_SUBREAPER``, Linux), so it
adopts its orphaned descendants, also those in other sessions. When the worker dies, the fork server, also a subreaper,
adopts them. Every child of the fork server that is not a live worker is therefore an orphan, and is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import resource
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from reward_loop._util.framing import frame
from reward_loop._util.process import adopt_orphans, children, descendants, die_with_parent, kill, kill_children
from reward_loop.processes import worker

_STACK_SECONDS = 2.0
"""Seconds that a worker past its deadline has to write its stack. On a busy machine it may not be scheduled at
once."""
_LOOK_SECONDS = 0.02
"""Seconds between checks whether the stack has been written."""
_MEMORY_SECONDS = 0.05
"""Seconds between memory measurements."""
_LINGER_SECONDS = 2.0
"""Seconds that a report waits for the worker's descendants to die. Uninterruptible sleep can delay their death."""
_STACK_LINES = 8
_CPU_ROUNDING_SECONDS = 0.1
"""The kernel compares the CPU time with its limit at clock ticks."""


@dataclass(frozen=True, slots=True)
class DeathReport:
    """How a worker ended."""

    code: int
    """The exit status, or the negative signal number."""
    memory_mb: float | None
    """The memory of the worker and its descendants (in 2^20 bytes) if it was killed for exceeding the limit."""
    max_memory_mb: int | None
    limit: str
    """The resource limit for which the kernel killed the worker; ``""`` if it was none."""
    stack: str
    """Traceback lines of the user's code if the worker crashed or passed its deadline; ``""`` if it wrote none."""


@dataclass(slots=True)
class _Child:
    pid: int
    channel: socket.socket
    """A copy of the worker's end of the socket pair."""
    stack_fd: int
    """The in-memory file that `faulthandler` writes to."""
    kill_at: float | None = None
    memory_mb: float | None = None
    report: DeathReport | None = None
    report_by: float = 0.0


def main(control_fd: int, parent_death_fd: int, max_memory_mb: int | None) -> NoReturn:
    """Run the fork server until the pool is closed or its process has died, then exit.

    Args:
        control_fd: the socket on which the pool sends the sockets of new workers.
        parent_death_fd: a pipe that closes when the pool's process dies.
        max_memory_mb: the memory limit of a worker with its descendants, in 2^20 bytes.
    """
    server = _ForkServer(socket.socket(fileno=control_fd), parent_death_fd, max_memory_mb)
    try:
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        kill_children()
        os._exit(0)


class _ForkServer:
    def __init__(self, control: socket.socket, parent_death_fd: int, max_memory_mb: int | None) -> None:
        self._pid = os.getpid()
        self._control = control
        self._parent_death_fd = parent_death_fd
        self._max_memory_mb = max_memory_mb
        self._alive: dict[int, _Child] = {}
        self._dead: list[_Child] = []
        self._woken_fd, wake_fd = os.pipe()
        os.set_blocking(self._woken_fd, False)
        os.set_blocking(wake_fd, False)
        self._own_fds = [control.fileno(), parent_death_fd, self._woken_fd, wake_fd]
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        # Only a signal with a handler is written to the wake-up descriptor; by default, the kernel discards this one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        adopt_orphans()
        self._poll = select.poll()
        self._poll.register(parent_death_fd, 0)  # the end of a pipe is always reported
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._woken_fd, select.POLLIN)

    def serve(self) -> None:
        """Process events until the pool is closed or its process has died."""
        while True:
            for fd, events in self._poll.poll(self._timeout_ms()):
                if fd == self._parent_death_fd:
                    return
                if fd == self._control.fileno():
                    if not self._fork():
                        return
                elif fd == self._woken_fd:
                    os.read(self._woken_fd, 4096)
                else:
                    self._abandon(fd, at_once=bool(events & select.POLLHUP))
            self._watch_memory()
            self._kill_late()
            self._reap()

    def _timeout_ms(self) -> float | None:
        """Return the milliseconds until the next timed action, or ``None``: the timeout of `poll`."""
        times = [child.kill_at for child in self._alive.values() if child.kill_at is not None]
        if times:
            times.append(time.monotonic() + _LOOK_SECONDS)  # check for written stacks
        times += [child.report_by for child in self._dead]
        if self._max_memory_mb is not None and self._alive:
            times.append(time.monotonic() + _MEMORY_SECONDS)
        return max(0.0, min(times) - time.monotonic()) * 1000 if times else None

    def _fork(self) -> bool:
        received, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not received:
            return False
        channel = socket.socket(fileno=fds[0])
        # Received descriptors are inheritable: a program that the function starts would hold the connection open.
        channel.set_inheritable(False)
        # Not a pipe: the fork server looks at the text several times, and a full pipe would block the worker.
        stack_fd = os.memfd_create("reward-function-stack")
        try:
            pid = os.fork()
        except OSError:  # No more processes available. The pool sees the end of the stream.
            channel.close()
            os.close(stack_fd)
            return True
        if pid == 0:
            try:
                self._become_worker()
                worker.serve(channel, stack_fd, self._max_memory_mb)
            finally:
                # An exception must not lead back into the fork server's own loop.
                os._exit(worker.EXIT_BROKEN)
        self._alive[pid] = _Child(pid, channel, stack_fd)
        self._poll.register(channel, select.POLLRDHUP)
        return True

    def _become_worker(self) -> None:
        """Set up the child process: close the fork server's files, and die when the fork server dies."""
        die_with_parent()
        if os.getppid() != self._pid:  # the fork server had died before
            os._exit(worker.EXIT_BROKEN)
        adopt_orphans()
        # A function that kills its process group must not kill the fork server.
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in self._own_fds:
            os.close(fd)
        # While a copy of another worker's connection is open, the pool does not see its end.
        for child in [*self._alive.values(), *self._dead]:
            child.channel.close()
            os.close(child.stack_fd)
        # If memory runs out, the kernel must kill a worker, not the trainer. Crashes must not leave core files.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def _abandon(self, fd: int, *, at_once: bool) -> None:
        """Kill the worker of a connection that the pool has shut down: at once, or after requesting its stack."""
        self._poll.unregister(fd)
        for child in self._alive.values():
            if child.channel.fileno() == fd:
                if at_once:
                    kill(child.pid)
                else:
                    child.kill_at = time.monotonic() + _STACK_SECONDS
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, worker.STACK_SIGNAL)

    def _kill_late(self) -> None:
        """Kill workers past their deadline that have written their stack, or had `_STACK_SECONDS` to do so."""
        now = time.monotonic()
        for child in self._alive.values():
            if child.kill_at is not None and (now >= child.kill_at or _has_written(child.stack_fd)):
                kill(child.pid)

    def _watch_memory(self) -> None:
        # Resident private memory instead of RLIMIT_AS: torch, thread stacks and JIT compilers reserve gigabytes of
        # address space that they never use, and RLIMIT_AS applies to each process, not to all processes of a call.
        if self._max_memory_mb is None:
            return
        for child in self._alive.values():
            used = sum(map(_own_memory_mb, descendants(child.pid)))
            if used > self._max_memory_mb and child.memory_mb is None:
                child.memory_mb = used
                kill(child.pid)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                cpu_limit = _cpu_limit(dead.si_pid)  # the kernel forgets it with the process
                pid, status, usage = os.wait4(dead.si_pid, 0)
                if child := self._alive.pop(pid, None):
                    with contextlib.suppress(KeyError):  # if `_abandon` has done it
                        self._poll.unregister(child.channel)
                    code = os.waitstatus_to_exitcode(status)
                    limit = _limit_of(code, usage.ru_utime + usage.ru_stime, cpu_limit)
                    stack = _read_stack(child.stack_fd)
                    child.report = DeathReport(code, child.memory_mb, self._max_memory_mb, limit, stack)
                    child.report_by = time.monotonic() + _LINGER_SECONDS
                    self._dead.append(child)
        orphans = [pid for pid in children(os.getpid()) if pid not in self._alive]
        for pid in orphans:
            kill(pid)
        now = time.monotonic()
        for child in list(self._dead):
            if not orphans or now >= child.report_by:
                self._dead.remove(child)
                _send_report(child)


def _send_report(child: _Child) -> None:
    # The report is a frame like those of the worker. If the worker died while sending a frame, or the pool has closed
    # its end, the report is lost; the pool then sees the end of the stream.
    with contextlib.suppress(OSError):
        # Without waiting: a pool that does not read must not delay the deadlines of other workers.
        child.channel.send(frame(worker.DIED, pickle.dumps(child.report)), socket.MSG_DONTWAIT)
    child.channel.close()
    os.close(child.stack_fd)


_OURS = f'"{Path(__file__).parent}{os.sep}'
"""Marks the lines of this package in a stack. The lines of the user's code come before them."""


def _written(fd: int) -> str:
    return os.pread(fd, 1 << 16, 0).decode(errors="replace")


def _has_written(fd: int) -> bool:
    """Whether `faulthandler` has written the user's part of the stack, completely or up to its own line limit."""
    text = _written(fd)
    return _OURS in text or text.endswith("  ...\n")


def _read_stack(fd: int) -> str:
    """Return the user's lines of the stack that `faulthandler` wrote, innermost first."""
    lines: list[str] = []
    for line in re.findall(r"^ +File .*$", _written(fd), flags=re.MULTILINE):
        if _OURS in line:
            break
        lines.append(line)
    return "\n".join(lines[:_STACK_LINES])


def _cpu_limit(pid: int) -> float:
    """Return the seconds of CPU time that a dead process, not yet reaped, was allowed to use."""
    try:
        with open(f"/proc/{pid}/limits") as file:
            found = re.search(r"^Max cpu time\s+(\d+)\s", file.read(), re.MULTILINE)
    except OSError:
        return math.inf
    return int(found[1]) if found else math.inf


def _limit_of(code: int, cpu_seconds: float, cpu_limit: float) -> str:
    """Return which resource limit the kernel has enforced by the signal that killed a worker, or ``""``."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_seconds >= cpu_limit - _CPU_ROUNDING_SECONDS:
        return (
            f"it used {cpu_seconds:.1f} s of CPU time in all its calls, and RLIMIT_CPU allows {cpu_limit:g} s. The "
            "function (`resource.setrlimit`) or the shell (`ulimit -t`) sets this limit; use `timeout` instead"
        )
    if code == -signal.SIGXFSZ:
        return "it wrote a file larger than RLIMIT_FSIZE (`resource.setrlimit`, or `ulimit -f`) allows"
    return ""


def _own_memory_mb(pid: int) -> float:
    """Return the resident memory (in 2^20 bytes) without file-backed pages, which processes share."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return 0.0
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) / 1024
