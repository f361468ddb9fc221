"""Reads the rows of a text file, which is JSONL or a JSON array."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.offline.compression import open_binary

__all__ = ["is_array", "read_contents"]


def read_contents(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each row, and its line as bytes, or its value if the file is a JSON array.

    Blank lines are left out. JSONL is read as needed; a JSON array is read as a whole.

    Raises:
        ConfigError: the file cannot be decompressed, or begins like a JSON array and is none.
    """
    with open_binary(path) as file:
        if _begins_as_array(file):
            text = file.read()
            try:
                values = json.loads(text)
            except RecursionError as error:
                raise ConfigError(f"{path} cannot be read as a JSON array: {error}") from error
            except ValueError as error:
                if not getattr(error, "msg", "").startswith("Extra data"):
                    raise ConfigError(f"{path} cannot be read as a JSON array: {error}") from error
                file = io.BufferedReader(io.BytesIO(text))  # lines, of which the first one is a list
            else:
                yield from ((f"row {index}", value) for index, value in enumerate(values))
                return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", line


def is_array(path: Path) -> bool:
    """Return whether a file begins like a JSON array."""
    with open_binary(path) as file:
        return _begins_as_array(file)


def _begins_as_array(file: io.BufferedReader) -> bool:
    return file.peek(io.DEFAULT_BUFFER_SIZE).lstrip().startswith(b"[")
