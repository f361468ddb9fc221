"""A stdout without the output of functions, and the console."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, TextIO

from rich.console import Console

__all__ = ["console", "reserve_stdout"]


@contextlib.contextmanager
def reserve_stdout() -> Iterator[TextIO]:
    """Yield a stream for the command's own stdout, and redirect what functions print to stderr, within ``with``.

    File descriptor 1 is redirected: this also covers C code, child processes and modules that hold the old
    `sys.stdout`. If `sys.stdout` was the process's own stdout, descriptor 1 leads to the null device after the block,
    because a function that timed out may still print from its thread.
    """
    before = sys.stdout
    # Now: after the redirection, buffered text would go to stderr.
    before.flush()
    owned = _descriptor(before) == 1
    saved = os.dup(1)
    own = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors) if owned else before
    stderr = os.dup(2)
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
