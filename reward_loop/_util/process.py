"""The settings of a process, and its ties to its parent and its children (Linux).

No process that the library starts survives its parent, even if that dies by SIGKILL. The parent holds the write end of
a pipe and never writes (`ParentDeathPipe`); the child blocks on reading it (`exit_with_parent`). When the parent dies,
the kernel closes the write end, the read returns, and the child exits. A subreaper (`adopt_orphans`) becomes the parent
of its orphaned descendants, and kills them (`kill_children`).

Worker processes and the reaper of model servers import this module, so it imports only small modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pathlib
import resource
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable

_OPEN_FILES = 65_536

GC_THRESHOLD = 200_000
"""The number of new objects that triggers a garbage collection. A sample in flight has about 30 objects, so Python's
default of 700 would trigger a collection every 24 samples, although samples in flight are not garbage."""


def raise_descriptor_limit() -> None:
    """Raise this process's limit on open files to 65,536, or to the hard limit if that is lower.

    Servers and reward workers call it because each connection is an open file. It never lowers the limit, and raises no
    error if the limit cannot be changed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def raise_gc_threshold() -> None:
    """Collect less often; see `GC_THRESHOLD`."""
    gc.set_threshold(GC_THRESHOLD)


def freeze_and_raise_gc_threshold() -> None:
    """Collect less often, and exclude the objects that exist now, such as imported modules.

    torch and verl create more than a million objects, which a full collection would scan for half a second.
    """
    gc.collect()  # garbage that is frozen would stay
    gc.freeze()
    raise_gc_threshold()


_EXITS_WITHIN_S = 10.0
"""Seconds within which exiting processes must have ended: those that hang in the kernel are left."""

_PF_EXITING = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process a subreaper: its orphaned descendants become its children, also those in other sessions."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that created it ends. Not inherited by child processes."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; an empty list if the process has ended."""
    found: list[int] = []
    # A process or thread that has ended in the meantime has no children.
    with contextlib.suppress(OSError):
        # The kernel lists the children of a process by the thread that started them.
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of the process and all its descendants."""
    found = [pid]
    for member in found:
        found += children(member)
    return found


def kill(pid: int) -> None:
    """Send SIGKILL to a process, unless it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_children() -> None:
    """Kill all children of this process, and wait until none is left.

    If this process has called `adopt_orphans`, the children of each killed process become its children, and are killed
    too.
    """
    with contextlib.suppress(ChildProcessError):  # no children are left
        while True:
            for pid in children(os.getpid()):
                kill(pid)
            os.waitpid(-1, 0)


def kill_marked(mark: str) -> None:
    """Kill all processes whose environment contains a mark, ``NAME=VALUE``, and wait until none is left.

    It finds processes that have left their group, session and parent. A process that rewrites its environment, as
    ``setproctitle`` does without ``SPT_NOENV``, is not found.
    """
    # Again: a marked process may have forked since it was listed.
    while marked := _marked(mark.encode()):
        for pid in marked:
            _wait_for(pid, kills=True)
    # An exiting process first frees its environment, so it may be marked, and later its files, such as those of a GPU.
    ends_by = time.monotonic() + _EXITS_WITHIN_S
    for pid in _exiting():
        # OSError: where `pidfd_open` is forbidden, as in some containers.
        with contextlib.suppress(OSError):
            _wait_for(pid, max(0.0, ends_by - time.monotonic()))


def _wait_for(pid: int, timeout_s: float | None = None, *, kills: bool = False) -> None:
    """Wait until a process has ended, and freed its memory and files."""
    with contextlib.suppress(ProcessLookupError):
        # Not `waitpid`: the process need not be a child of this one.
        ended = os.pidfd_open(pid)
        try:
            if kills:
                kill(pid)
            poll = select.poll()  # `select.select` allows no descriptor above 1023
            poll.register(ended, select.POLLIN)
            poll.poll(None if timeout_s is None else timeout_s * 1000)
        finally:
            os.close(ended)


def _exiting() -> list[int]:
    """Return the pids of this user's processes that are exiting."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            path = pathlib.Path("/proc", name)
            flags = int(path.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[6])
            if flags & _PF_EXITING and path.stat().st_uid == os.geteuid():
                found.append(int(name))
    return found


def _marked(mark: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        # The environment of a zombie is empty; that of other users' processes cannot be read.
        with contextlib.suppress(OSError):
            if name.isdecimal() and mark in pathlib.Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class ParentDeathPipe:
    """The parent's side. Pass ``child_fd`` to the child, and call `close_child_fd` after the child has started."""

    def __init__(self) -> None:
        self.child_fd, self._fd = os.pipe()
        _open.add(self)

    def close_child_fd(self) -> None:
        """Close this process's copy of the child's end of the pipe."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def close(self) -> None:
        """Close the pipe: a child that still runs exits."""
        self.close_child_fd()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _open.discard(self)


_open: weakref.WeakSet[ParentDeathPipe] = weakref.WeakSet()


def _close_copies() -> None:
    for pipe in list(_open):
        pipe.close()


# exec closes the write end, but a plain fork (multiprocessing, a data loader) would keep a copy of it open.
os.register_at_fork(after_in_child=_close_copies)


def exit_with_parent(fd: int, before_exit: Callable[[], None] = lambda: None) -> None:
    """Start a thread that exits this process, without clean-up, when the parent closes the pipe or dies.

    ``fd`` is the inherited read end of the pipe; ``before_exit`` is called in that thread.
    """

    def wait() -> None:
        os.read(fd, 1)
        try:
            before_exit()
        finally:
            os._exit(1)  # `sys.exit` would end only this thread

    # Not `die_with_parent`: its signal comes as soon as the parent's thread that started this process ends.
    threading.Thread(target=wait, name="parent-death-pipe", daemon=True).start()
