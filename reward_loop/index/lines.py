"""The growth of a file: complete lines that were appended since the last read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_BLOCK = 64 * 1024
_HEAD = 256


class Lines(NamedTuple):
    """Complete lines of a file."""

    path: Path
    start: int
    """The offset of the first line in the file."""
    bytes: int


class Chunk(NamedTuple):
    """Lines of files that are read together, from a copy."""

    number: int
    path: Path
    """The copy; its name without the suffix is the number."""
    parts: Sequence[Lines]
    """Where the lines are in the folder."""


def new_lines(path: Path, start: int, at_most: int) -> Lines | None:
    """Return the complete lines from an offset on; ``None`` if there are none, or the file does not exist.

    Args:
        path: the file.
        start: the offset of the beginning of a line.
        at_most: the largest number of bytes; if the first line is longer, that line.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = _last_end(file, start, min(size, start + at_most))
            if end == start and size > start + at_most:
                end = _first_end(file, start + at_most) or start
    except FileNotFoundError:
        return None
    return Lines(path, start, end - start) if end > start else None


def append(lines: Lines, output: BinaryIO) -> None:
    """Append lines to an open file, which must not be buffered.

    Raises:
        OSError: the lines cannot be read or written.
        EOFError: the file has become shorter.
    """
    with lines.path.open("rb") as file:
        offset, end = lines.start, lines.start + lines.bytes
        while offset < end:
            # Writes past the buffer of `output`: bytes in it would be written later, in the wrong place.
            sent = os.sendfile(output.fileno(), file.fileno(), offset, end - offset)
            if not sent:
                raise EOFError(f"{lines.path} has become shorter")
            offset += sent


def fingerprint(path: Path) -> bytes:
    """Return the beginning of the first line, which differs between files; empty if there is no complete line."""
    try:
        with path.open("rb") as file:
            line = file.readline(_HEAD)
    except FileNotFoundError:
        return b""
    # An incomplete line may still grow, and would not be the same afterwards.
    return line if line.endswith(b"\n") or len(line) == _HEAD else b""


def _last_end(file: BinaryIO, start: int, end: int) -> int:
    """Return the end of the last line that ends between two offsets; `start` if none does."""
    while end > start:
        begin = max(start, end - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return start


def _first_end(file: BinaryIO, start: int) -> int | None:
    """Return the end of the line at an offset; ``None`` if it is incomplete."""
    file.seek(start)
    while block := file.read(_BLOCK):
        found = block.find(b"\n")
        if found >= 0:
            return file.tell() - len(block) + found + 1
    return None
