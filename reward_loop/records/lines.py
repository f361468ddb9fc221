"""Reads the lines of the files of records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from reward_loop.errors import ConfigError
from reward_loop.records.rows import VERSION

__all__ = ["check_version", "has_step", "is_readable", "parse_line", "read_files", "read_rows"]

_STEP = re.compile(rb'"step":\s*(-?\d{1,18})\b')


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; ``None`` if the line is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def read_files(
    folder: Path, is_wanted: Callable[[bytes], Any] | None = None
) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the file of each line in a folder, and the object in the line; ``None`` for an incomplete line.

    Nothing if there is no such folder. ``is_wanted`` selects the lines to parse; by default all.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                if is_wanted is None or is_wanted(line):
                    yield path, parse_line(line)


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in all files of a folder, without incomplete lines.

    Raises:
        ConfigError: a newer version has written them.
    """
    for path, row in read_files(folder):
        if row is not None:
            check_version(row.get("version", 0), path)
            yield row


def has_step(line: bytes, steps: Collection[int], head: int | None = None) -> bool:
    """Return whether a line, which is not parsed, has a field ``step`` with one of some steps in its first bytes.

    ``head`` is the number of these bytes; ``None`` searches the whole line.
    """
    return any(int(step) in steps for step in _STEP.findall(line, 0, len(line) if head is None else head))


def is_readable(row: dict[str, Any]) -> bool:
    """Return whether this version reads a row."""
    version = row.get("version", VERSION)
    return isinstance(version, int) and version <= VERSION


def check_version(version: Any, where: Path) -> None:
    """Check that this version of the library reads the records in a file or folder.

    Raises:
        ConfigError: a newer version has written them.
    """
    if isinstance(version, int) and version > VERSION:  # another program may use other versions
        raise ConfigError(
            f"{where} has records of version {version}, and this version of reward_loop reads version "
            f"{VERSION}: use the reward_loop that wrote them, or a newer one"
        )
