"""Standard output that may be closed or on a full disk."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

__all__ = ["open_standard_streams", "print_line"]


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed (``command >&-``).

    Python represents a closed stream as ``None``, on which libraries fail. Call it first: the next file that the
    process opens would get the free descriptor, and receive what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process runs)


def print_line(line: str) -> None:
    """Print a line to standard output; drop it if standard output cannot be written, such as on a full disk.

    For lines that inform only: a server must serve without them.
    """
    try:
        print(line, flush=True)
    except (OSError, ValueError):  # ValueError: the stream was closed
        atexit.unregister(_discard_unwritten)
        atexit.register(_discard_unwritten)


def _discard_unwritten() -> None:
    """Discard buffered output that cannot be written; the interpreter would exit with status 120 otherwise."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
