"""Standard streams that are closed or cannot be written, a stdout without the output of functions, and the console."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
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
        # Registered once, however many lines fail.
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


@contextlib.contextmanager
def reserve_stdout() -> Iterator[TextIO]:
    """Yield a stream for the command's own stdout, and redirect what functions print to stderr, within ``with``.

    File descriptor 1 is redirected: this also covers C code, child processes and modules that hold the old
    `sys.stdout`. If `sys.stdout` was the process's own stdout, descriptor 1 leads to the null device after the block,
    because a function that timed out may still print from its thread.
    """
    before = sys.stdout
    if before is None:  # closed by the shell: >&-
        with open(os.devnull, "w") as nothing:
            yield nothing
        return
    # Now: after the redirection, buffered text would go to stderr.
    before.flush()
    owned = _descriptor(before) == 1
    saved = os.dup(1)
    own = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors) if owned else before
    stderr = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else os.dup(2)
    os.dup2(stderr, 1)
    # `closefd=False`: descriptor 1 must stay open when this stream is collected.
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
        for descriptor in (nothing_fd, saved, stderr):
            os.close(descriptor)
        if owned:
            with contextlib.suppress(OSError):  # the flush above has reported it
                own.close()


def _descriptor(stream: IO[str]) -> int | None:
    try:
        return stream.fileno()
    except (OSError, io.UnsupportedOperation, AttributeError):
        return None


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that only interprets markup: no emoji codes, no colours for numbers, no wrapping."""
    return Console(file=file, stderr=stderr, soft_wrap=True, emoji=False, highlight=False)
