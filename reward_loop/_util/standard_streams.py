"""A stdout without the output of functions, and the console."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import IO, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


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


_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal may obey: control characters but line break and tab, and those that change the direction of text."""

WIDE = 10_000
"""The number of columns of an output that is not a terminal: a pipe or a file has no edge at which to cut."""


class _Console(Console):
    """Shows control characters as their escapes: texts, names and errors may come from a model or from a server."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not _UNSAFE.search(segment.text):
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def printable(text: str) -> str:
    """Return a text with escapes in place of the characters that a terminal may obey."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Return a console that only interprets markup: no emoji codes, no colours for numbers, no wrapping.

    Control characters are shown as their escapes, such as ``\\x1b``; without a terminal, nothing is cut to a width.
    """
    found = _Console(file=file, stderr=stderr, soft_wrap=True, emoji=False, highlight=False)
    if not found.is_terminal:
        found.width = WIDE
    return found
