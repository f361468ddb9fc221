"""The template of one pool: a process that has loaded the function, and forks, watches and kills the children.

It is a process of its own, started by exec, because neither side can do its work: the trainer has threads, and must not
fork, and a child may hold the interpreter's lock, and cannot watch itself.

==========================================  =========================================================================
Event                                       Reaction
==========================================  =========================================================================
The pool sends one end of a socket pair     Fork a child that serves calls on it (`reward_loop.processes.child`)
The pool shuts down its end                 Kill the child
A child exceeds ``max_memory_mb``           Kill the child
A child dies for any reason                 Kill its descendants, write why to its report, close the connection
The pool's process dies (pipe closes)       Kill all children and exit
==========================================  =========================================================================

Invariant: no descendant of a child survives it. A child is a subreaper (``PR_SET_CHILD_SUBREAPER``, Linux), so it
adopts its orphaned descendants, also those in other sessions. When it dies, the template, also a subreaper, adopts
them: it kills each process that it has neither forked nor started while it loaded the function.

A fork has neither the threads of the template nor connections or a GPU of its own. If loading the function leaves one
of these, the template starts itself anew, without the function, and each child loads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import re
import resource
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

from reward_loop._util.process import adopt_orphans, children, descendants, die_with_parent, kill, kill_children
from reward_loop.processes import child
from reward_loop.processes.child import Setup

_MEMORY_SECONDS = 0.05
"""Seconds between memory measurements."""
_AGAIN = "without-function"
"""The argument of a template that has started itself anew."""


@dataclass(slots=True)
class _Forked:
    pid: int
    connection: socket.socket
    """A copy of the child's end of the socket pair: the pool sees the end only when the template closes it, too."""
    report_fd: int
    """A file in memory, for the pool: what `faulthandler` wrote, and then how the child ended."""
    memory_mb: float | None = None
    """The memory for which the child was killed."""
    code: int | None = None
    """The exit status of the dead child, or the negative number of a signal."""


def main(control_fd: int, parent_death_fd: int, setup_fd: int) -> NoReturn:
    """Run the template until the pool is closed or its process has died, then exit.

    Args:
        control_fd: the socket on which the pool sends, for each child, its connection and its report.
        parent_death_fd: a pipe that closes when the pool's process dies.
        setup_fd: a file with the pickled `Setup`.
    """
    fds = (control_fd, parent_death_fd, setup_fd)
    for fd in fds:
        os.set_inheritable(fd, False)  # not for programs that the function starts
    # A core of each crash, which containers often allow, could fill the disk with the records.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable(setup_fd, all_threads=False)  # for the pool, which aborts a template that hangs
    try:
        setup: Setup = pickle.loads(os.pread(setup_fd, os.fstat(setup_fd).st_size, 0))
        function = None
        adopt_orphans()
        if setup.calls is not None and _AGAIN not in sys.argv:
            function = child.load(setup)
            if obstacle := _obstacle(fds):
                _start_again(setup.name, obstacle, fds)
            gc.collect()
            gc.freeze()  # the children's collections would write to these objects, and so copy their memory
        _Forks(socket.socket(fileno=control_fd), parent_death_fd, setup, function).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        kill_children()
        os._exit(0)


def _obstacle(own_fds: tuple[int, ...]) -> str:
    """Return what this process has that a fork of it could not use; ``""`` if there is nothing."""
    # Libraries that prepare for a fork, such as OpenBLAS, end their threads before it.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if threads := len(os.listdir("/proc/self/task")) - 1:
        return f"{threads} {'thread' if threads == 1 else 'threads'}"
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith(("/dev/nvidia", "/dev/kfd")):
                return "a GPU"
            if link.startswith("socket:") and fd not in own_fds:
                with socket.socket(fileno=os.dup(fd)) as copy:
                    if address := copy.getpeername():  # empty for a pair of sockets
                        return f"a connection to {address}"
    return ""


def _start_again(name: str, obstacle: str, fds: tuple[int, ...]) -> NoReturn:
    print(
        f"reward_loop: loading {name} leaves {obstacle} in its process, which a fork cannot use: each process loads "
        "the function itself, and serves calls until it is killed (calls_per_process=null)",
        file=sys.stderr,
        flush=True,
    )
    kill_children()
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execv(sys.executable, [*sys.orig_argv, _AGAIN])


class _Forks:
    def __init__(
        self, control: socket.socket, parent_death_fd: int, setup: Setup, function: child.Function | None
    ) -> None:
        self._control = control
        self._parent_death_fd = parent_death_fd
        self._setup = setup
        self._function = function
        """``None``: each child loads it."""
        self._own_mb = _memory_mb(os.getpid())
        self._helpers = set(children(os.getpid()))
        """The processes that loading the function has started."""
        self._alive: dict[int, _Forked] = {}
        self._dead: list[_Forked] = []
        self._woken_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        # Only a signal with a handler is written to the wake-up descriptor; by default, the kernel discards this one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(parent_death_fd, 0)  # the end of a pipe is always reported
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._woken_fd, select.POLLIN)

    def serve(self) -> None:
        """Process events until the pool is closed or its process has died."""
        watches = self._setup.max_memory_mb is not None
        while True:
            for fd, _ in self._poll.poll(_MEMORY_SECONDS * 1000 if watches and self._alive else None):
                if fd == self._parent_death_fd:
                    return
                if fd == self._control.fileno():
                    if not self._fork():
                        return
                elif fd == self._woken_fd:
                    os.read(self._woken_fd, 4096)
                else:
                    self._kill(fd)
            if watches:
                self._watch_memory()
            self._reap()

    def _fork(self) -> bool:
        received, fds, _, _ = socket.recv_fds(self._control, 1, 2)
        if not received:
            return False
        connection, report_fd = socket.socket(fileno=fds[0]), fds[1]
        for fd in fds:
            os.set_inheritable(fd, False)  # a program that the function starts would hold the connection open
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the child would write it, too
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError:  # No more processes available. The pool sees the end of the stream.
            connection.close()
            os.close(report_fd)
            return True
        if pid == 0:
            try:
                self._become_child(template)
                function, calls = self._function, self._setup.calls
                if function is None:
                    faulthandler.dump_traceback_later(self._setup.load_s, exit=True, file=report_fd)
                    function, calls = child.load(self._setup), None
                    faulthandler.cancel_dump_traceback_later()
                child.serve(connection, report_fd, function, calls)
            finally:
                # An exception must not lead back into the template's own loop.
                os._exit(child.EXIT_BROKEN)
        self._alive[pid] = _Forked(pid, connection, report_fd)
        self._poll.register(connection, select.POLLRDHUP)
        return True

    def _become_child(self, template: int) -> None:
        """Set up the child, which dies with the template."""
        die_with_parent()
        if os.getppid() != template:  # it had died before
            os._exit(child.EXIT_BROKEN)
        adopt_orphans()
        # A function that kills its process group must not kill the template.
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # While a copy of another child's connection is open, the pool does not see its end.
        for other in [*self._alive.values(), *self._dead]:
            other.connection.close()
            os.close(other.report_fd)
        # If memory runs out, the kernel must kill a child, not the trainer.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    def _kill(self, fd: int) -> None:
        """Kill the child of a connection that the pool has shut down."""
        self._poll.unregister(fd)
        for one in self._alive.values():
            if one.connection.fileno() == fd:
                kill(one.pid)

    def _watch_memory(self) -> None:
        # Resident memory instead of RLIMIT_AS: torch, thread stacks and JIT compilers reserve gigabytes of address
        # space that they never use, and RLIMIT_AS applies to each process, not to all processes of a call.
        assert self._setup.max_memory_mb is not None
        for one in self._alive.values():
            used = sum(map(_memory_mb, descendants(one.pid))) - self._own_mb
            if used > self._setup.max_memory_mb and one.memory_mb is None:
                one.memory_mb = used
                kill(one.pid)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if one := self._alive.pop(ended[0], None):
                    with contextlib.suppress(KeyError):  # if `_kill` has done it
                        self._poll.unregister(one.connection)
                    one.code = os.waitstatus_to_exitcode(ended[1])
                    self._dead.append(one)
        orphans = [pid for pid in children(os.getpid()) if pid not in self._alive and pid not in self._helpers]
        for pid in orphans:
            kill(pid)
        while self._dead and not orphans:  # otherwise, the end of each orphan leads here again
            one = self._dead.pop()
            os.write(one.report_fd, f"\nended with {one.code}, memory {one.memory_mb}\n".encode())
            os.close(one.report_fd)
            one.connection.close()


def _memory_mb(pid: int) -> float:
    """Return the resident memory (in 2^20 bytes) without file-backed pages, which processes share."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return 0.0
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) / 1024
