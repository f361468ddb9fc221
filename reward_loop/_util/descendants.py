"""Finds, adopts and kills child processes (Linux), so that no descendant of a process survives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

__all__ = ["adopt_orphans", "children", "descendants", "die_with_parent", "kill", "kill_children"]

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


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
