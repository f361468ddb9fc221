"""Ends a child process when its parent dies, even by SIGKILL.

The parent holds the write end of a pipe and never writes. The child blocks on reading the pipe. When the parent dies,
the kernel closes the write end, the read returns, and the child exits.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["Lifeline", "follow"]


class Lifeline:
    """The parent's side of the pipe.

    Pass ``child_fd`` to the child, and call :meth:`release` after the child has started.
    """

    def __init__(self) -> None:
        self.child_fd, self._fd = os.pipe()
        _held.add(self)

    def release(self) -> None:
        """Closes this process's copy of the child's end of the pipe."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def cut(self) -> None:
        """Closes the pipe: a child that still runs exits."""
        self.release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _held.discard(self)


_held: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _cut_copies() -> None:
    for lifeline in list(_held):
        lifeline.cut()


# exec closes the write end, but a plain fork (multiprocessing, a data loader) would keep a copy of it open.
os.register_at_fork(after_in_child=_cut_copies)


def follow(fd: int) -> None:
    """Starts a thread that exits this process, without clean-up, when the parent closes the pipe or dies.

    Args:
        fd: the read end of the pipe, inherited from the parent.
    """

    def wait() -> None:
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
