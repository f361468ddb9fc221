"""Handles standard streams that are closed or cannot be written."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys

__all__ = ["open_standard_streams", "print_line"]


def open_standard_streams() -> None:
    """Opens the null device in place of each standard stream that is closed (``command >&-``).

    Python represents a closed stream as ``None``, on which libraries fail. Call this function first: otherwise the next
    file that the process opens gets the free descriptor, and printed text is written to that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process runs)


def print_line(line: str) -> None:
    """Prints a line to standard output; drops it if standard output cannot be written, such as on a full disk.

    For informational lines only: a server must run without them.
    """
    try:
        print(line, flush=True)
    except (OSError, ValueError):  # ValueError: the stream was closed
        atexit.unregister(_discard_unwritten)
        atexit.register(_discard_unwritten)


def _discard_unwritten() -> None:
    """Discards buffered output that cannot be written; otherwise the interpreter would exit with status 120."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
