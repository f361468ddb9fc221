"""Ends a child process when its parent dies, even by SIGKILL.

The parent holds the write end of a pipe and never writes. The child blocks on reading the pipe. When the parent dies,
the kernel closes the write end, the read returns, and the child exits.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["ParentDeathPipe", "exit_with_parent"]


class ParentDeathPipe:
    """The parent's side. Pass ``child_fd`` to the child, and call `close_child_fd` after the child has started."""

    def __init__(self) -> None:
        self.child_fd, self._fd = os.pipe()
        _open.add(self)

    def close_child_fd(self) -> None:
        """Closes this process's copy of the child's end of the pipe."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def close(self) -> None:
        """Closes the pipe: a child that still runs exits."""
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
            os._exit(1)

    threading.Thread(target=wait, name="parent-death-pipe", daemon=True).start()
