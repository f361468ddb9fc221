"""Standard streams that are closed or cannot be written, a stdout without the output of functions, and the console."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import IO, TextIO

from rich.console import Console

__all__ = ["console", "open_standard_streams", "print_line", "reserve_stdout"]


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed (``command >&-``).

    Python represents a closed stream as ``None``, on which libraries fail. Call this function first: otherwise the next
    file that the process opens gets the free descriptor, and printed text is written to that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process runs)


def print_line(line: str) -> None:
    """Print a line to standard output; drop it if standard output cannot be written, such as on a full disk.

    For informational lines only: a server must run without them.
    """
    try:
        print(line, flush=True)
    except (OSError, ValueError):  # ValueError: the stream was closed
        atexit.unregister(_discard_unwritten)
        atexit.register(_discard_unwritten)


def _discard_unwritten() -> None:
    """Discard buffered output that cannot be written; otherwise the interpreter would exit with status 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)


_PIPE_BYTES = 1 << 16


@contextlib.contextmanager
def reserve_stdout(max_bytes: int | None = None) -> Iterator[TextIO]:
    """Yield a stream for the command's own stdout, and redirect what functions print to stderr, within ``with``.

    File descriptor 1 is redirected: this also covers C code, child processes and modules that hold the old
    `sys.stdout`. If `sys.stdout` was the process's own stdout, descriptor 1 leads to the null device after the block,
    because a function that timed out may still print from its thread.

    Args:
        max_bytes: maximum number of redirected bytes that are shown; the rest is only counted. ``None`` for no limit.
    """
    before = sys.stdout
    if before is None:  # closed by the shell: >&-
        with open(os.devnull, "w") as nothing:
            yield nothing
        return
    before.flush()
    owned = _descriptor(before) == 1
    saved = os.dup(1)
    own = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors) if owned else before
    stderr = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else os.dup(2)
    copier = None if max_bytes is None else _Copier(stderr, max_bytes)
    os.dup2(stderr if copier is None else copier.input, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        yield own
        own.flush()
    finally:
        with contextlib.suppress(OSError, ValueError):  # the function may have closed it
            sys.stdout.flush()
        sys.stdout = before
        nothing_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing_fd if owned else saved, 1)
        if copier is not None:
            copier.close()
        for descriptor in (nothing_fd, saved, stderr):
            os.close(descriptor)
        if owned:
            with contextlib.suppress(OSError):  # the flush above has reported it
                own.close()


class _Copier:
    """Copies the first bytes of a pipe to a descriptor, in a thread, and counts the rest."""

    def __init__(self, output: int, max_bytes: int) -> None:
        self._output = output
        self._left = max_bytes
        self._dropped = 0
        self._pipe, self.input = os.pipe()
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="stdout-copier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the rest of the pipe, report the number of bytes that were not shown, and end the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for descriptor in (self._pipe, self.input, self._stop):
            os.close(descriptor)

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._pipe, select.POLLIN)
        ready.register(self._stop, select.POLLIN)
        stopped = False
        while not stopped:
            found = {descriptor for descriptor, _ in ready.poll()}
            stopped = self._stop in found
            if self._pipe in found:
                # The read size is the pipe's capacity: after the stop, one read returns all bytes written before.
                self._copy(os.read(self._pipe, _PIPE_BYTES))
        if self._dropped:
            self._write(f"\nnote: {self._dropped:,} more bytes of the function's output are not shown\n".encode())

    def _copy(self, data: bytes) -> None:
        shown = data[: self._left]
        self._left -= len(shown)
        self._dropped += len(data) - len(shown)
        if shown:
            self._write(shown)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # stderr is full or closed
            os.write(self._output, data)


def _descriptor(stream: IO[str]) -> int | None:
    try:
        return stream.fileno()
    except (OSError, io.UnsupportedOperation, AttributeError):
        return None


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that only interprets markup: no emoji codes, no colours for numbers, no wrapping."""
    return Console(file=file, stderr=stderr, soft_wrap=True, emoji=False, highlight=False)
