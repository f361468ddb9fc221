"""The process that forks the workers of one pool, watches them and kills them: single-threaded, and light.

It stands between the trainer and the user's code, because neither can do this. The trainer has threads, so it must not
fork; a worker may hold the interpreter's lock for ever (a regular expression does), so it cannot watch itself.

- The pool sends one end of a socket pair; a worker is forked that answers on it (`reward_loop.processes.worker`).
- The pool shuts its end down, wholly or for writing, and the worker is killed.
- The pool's process dies, and with it the lifeline: all workers are killed.
- A worker dies, however: everything that it started is killed, then the pool gets a `Report` on the worker's socket.

Nothing that a worker starts gets away. A worker adopts the orphans of its own descendants (``PR_SET_CHILD_SUBREAPER``,
Linux), whatever sessions they make; when it dies this process adopts them all. So each child here that is no worker is
to be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from reward_loop.processes import worker

__all__ = ["Report", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_STACK_SECONDS = 2.0
"""How long a worker past its deadline has, at most, to write down where it is. On a busy machine, it may not run at
once."""
_LOOK_SECONDS = 0.02
"""How often it is looked whether it has."""
_MEMORY_SECONDS = 0.05
"""How often memory is measured."""
_LINGER_SECONDS = 2.0
"""How long a report waits for the end of what the worker started. Uninterruptible sleep can delay that."""
_STACK_LINES = 8


@dataclass(frozen=True, slots=True)
class Report:
    """How a worker ended."""

    code: int
    """Its exit status, or the negative number of the signal."""
    memory_mb: float | None
    """What it used, with what it had started, when it was killed for that."""
    max_memory_mb: int | None
    stack: str
    """Where it was: lines of a traceback, if it crashed or passed its deadline, and could write them."""


@dataclass(slots=True)
class _Child:
    pid: int
    channel: socket.socket
    """A copy of the worker's own end."""
    stack_fd: int
    """The file in memory that `faulthandler` writes to."""
    kill_at: float | None = None
    memory_mb: float | None = None
    report: Report | None = None
    report_by: float = 0.0


def main(control_fd: int, lifeline_fd: int, max_memory_mb: int | None) -> NoReturn:
    """Serve until the pool is closed or its process is gone."""
    server = _ForkServer(socket.socket(fileno=control_fd), lifeline_fd, max_memory_mb)
    try:
        server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        server.end()
        os._exit(0)


class _ForkServer:
    def __init__(self, control: socket.socket, lifeline_fd: int, max_memory_mb: int | None) -> None:
        self._pid = os.getpid()
        self._control = control
        self._lifeline_fd = lifeline_fd
        self._max_memory_mb = max_memory_mb
        self._alive: dict[int, _Child] = {}
        self._dead: list[_Child] = []
        self._woken_fd, wake_fd = os.pipe()
        os.set_blocking(self._woken_fd, False)
        os.set_blocking(wake_fd, False)
        self._own_fds = [control.fileno(), lifeline_fd, self._woken_fd, wake_fd]
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._poll = select.poll()
        self._poll.register(lifeline_fd, 0)
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._woken_fd, select.POLLIN)

    def serve(self) -> None:
        """Return when the pool is gone."""
        while True:
            for fd, events in self._poll.poll(self._patience_ms()):
                if fd == self._lifeline_fd:
                    return
                if fd == self._control.fileno():
                    if not self._fork():
                        return
                elif fd == self._woken_fd:
                    os.read(self._woken_fd, 4096)
                else:
                    self._given_up(fd, wholly=bool(events & select.POLLHUP))
            self._watch_memory()
            self._kill_late()
            self._reap()

    def end(self) -> None:
        """Kill all that is left, and wait for it."""
        deadline = time.monotonic() + _LINGER_SECONDS
        while (children := _children(os.getpid())) and time.monotonic() < deadline:
            for pid in children:
                _kill(pid)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            self._poll.poll(10)

    def _patience_ms(self) -> float | None:
        """Until something must be done that no descriptor announces."""
        times = [child.kill_at for child in self._alive.values() if child.kill_at is not None]
        if times:
            times.append(time.monotonic() + _LOOK_SECONDS)  # to see whether their stacks are there
        times += [child.report_by for child in self._dead]
        if self._max_memory_mb is not None and self._alive:
            times.append(time.monotonic() + _MEMORY_SECONDS)
        return max(0.0, min(times) - time.monotonic()) * 1000 if times else None

    def _fork(self) -> bool:
        received, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not received:
            return False
        channel = socket.socket(fileno=fds[0])
        channel.set_inheritable(False)
        stack_fd = os.memfd_create("reward-function-stack")
        try:
            pid = os.fork()
        except OSError:  # No more processes. The pool learns it from the end of the stream.
            channel.close()
            os.close(stack_fd)
            return True
        if pid == 0:
            try:
                self._become_worker()
                worker.serve(channel, stack_fd, self._max_memory_mb)
            finally:
                os._exit(worker.EXIT_BROKEN)
        self._alive[pid] = _Child(pid, channel, stack_fd)
        self._poll.register(channel, select.POLLRDHUP)
        return True

    def _become_worker(self) -> None:
        """In the child: let go of what is the fork server's, and take its death for one's own."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(worker.EXIT_BROKEN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in self._own_fds:
            os.close(fd)
        for child in [*self._alive.values(), *self._dead]:
            child.channel.close()
            os.close(child.stack_fd)
        # Where memory runs out, the kernel is to take a worker rather than the trainer. Crashes leave no core files.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def _given_up(self, fd: int, *, wholly: bool) -> None:
        self._poll.unregister(fd)
        for child in self._alive.values():
            if child.channel.fileno() == fd:
                if wholly:
                    _kill(child.pid)
                else:
                    child.kill_at = time.monotonic() + _STACK_SECONDS
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, worker.STACK_SIGNAL)

    def _kill_late(self) -> None:
        """Kill the workers that have been given up, once they have written down where they are."""
        now = time.monotonic()
        for child in self._alive.values():
            if child.kill_at is not None and (now >= child.kill_at or _has_written(child.stack_fd)):
                _kill(child.pid)

    def _watch_memory(self) -> None:
        # The resident memory that is its own, rather than RLIMIT_AS: torch, thread stacks and JIT compilers reserve
        # gigabytes of addresses that they never touch, and a limit of addresses does not hold for all processes of
        # one call together.
        if self._max_memory_mb is None:
            return
        for child in self._alive.values():
            used = sum(map(_own_memory_mb, _family(child.pid)))
            if used > self._max_memory_mb and child.memory_mb is None:
                child.memory_mb = used
                _kill(child.pid)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if child := self._alive.pop(pid, None):
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(child.channel)
                    code = os.waitstatus_to_exitcode(status)
                    child.report = Report(code, child.memory_mb, self._max_memory_mb, _read_stack(child.stack_fd))
                    child.report_by = time.monotonic() + _LINGER_SECONDS
                    self._dead.append(child)
        orphans = [pid for pid in _children(os.getpid()) if pid not in self._alive]
        for pid in orphans:
            _kill(pid)
        now = time.monotonic()
        for child in list(self._dead):
            if not orphans or now >= child.report_by:
                self._dead.remove(child)
                _send_report(child)


def _send_report(child: _Child) -> None:
    # To a pool that reads, the report is a frame like those of the worker. It is lost where the worker died within a
    # frame of its own, or the pool has gone; the end of the stream tells enough then.
    frame = pickle.dumps(child.report)
    with contextlib.suppress(OSError):
        child.channel.send(worker.HEADER.pack(worker.DIED, len(frame)) + frame, socket.MSG_DONTWAIT)
    child.channel.close()
    os.close(child.stack_fd)


_OURS = f'"{Path(__file__).parent}{os.sep}'
"""What the lines of this package have in a stack; those of the user's code come first."""


def _written(fd: int) -> str:
    return os.pread(fd, 1 << 16, 0).decode(errors="replace")


def _has_written(fd: int) -> bool:
    """Whether the user's part is there as a whole, or as much of a deep stack as `faulthandler` writes."""
    text = _written(fd)
    return _OURS in text or text.endswith("  ...\n")


def _read_stack(fd: int) -> str:
    """The user's part of what `faulthandler` wrote, innermost line first."""
    lines: list[str] = []
    for line in re.findall(r"^ +File .*$", _written(fd), flags=re.MULTILINE):
        if _OURS in line:
            break
        lines.append(line)
    return "\n".join(lines[:_STACK_LINES])


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # A process or thread that ends meanwhile has no children any more.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _family(pid: int) -> list[int]:
    """The process and all its descendants."""
    family = [pid]
    for member in family:
        family += _children(member)
    return family


def _own_memory_mb(pid: int) -> float:
    """Resident memory without the pages of files, which processes share."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return 0.0
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) / 1024
