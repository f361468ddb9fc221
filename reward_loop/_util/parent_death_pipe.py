"""How a child process learns that its parent is gone, however that happened.

The parent holds the write end of a pipe and never writes; the child blocks on reading. The kernel closes the write end
when the parent dies, even by SIGKILL, and the child then ends itself.
"""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["Lifeline", "follow"]


class Lifeline:
    """The parent's side. Pass ``child_fd`` to the child, and call :meth:`release` once the child has been started."""

    def __init__(self) -> None:
        self.child_fd, self._fd = os.pipe()
        _held.add(self)

    def release(self) -> None:
        """Closes this process's copy of the child's end."""
        if self.child_fd >= 0:
            os.close(self.child_fd)
            self.child_fd = -1

    def cut(self) -> None:
        """Lets go: a child that is still there ends itself."""
        self.release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _held.discard(self)


_held: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _cut_copies() -> None:
    for lifeline in list(_held):
        lifeline.cut()


# A pipe end is closed by exec, but a plain fork (multiprocessing, a data loader) would keep a copy of it open.
os.register_at_fork(after_in_child=_cut_copies)


def follow(fd: int) -> None:
    """The child's side: ends this process, at once and without clean-up, when the parent's end of ``fd`` is closed."""

    def wait() -> None:
        os.read(fd, 1)
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
