"""The inputs of a command: files and folders of rollouts, patterns of file names, and standard input."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from reward_loop.errors import ConfigError
from reward_loop.offline.compression import SUFFIXES
from reward_loop.offline.contents import is_array
from reward_loop.offline.folders import files_of
from reward_loop.offline.rows import Row, check_input, count_rows, is_parquet, read_rows

__all__ = ["Inputs"]

_STDIN = "-"


@dataclass(frozen=True, slots=True)
class Inputs:
    """One or several inputs, which are read one after the other as if they were one file."""

    paths: tuple[Path, ...]
    is_stdin: bool = False
    """Whether the only path is that of a copy of standard input."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, names: Sequence[str]) -> Iterator[Self]:
        """Yield the inputs that a command line names; each exists, and has a supported format.

        Args:
            names: files, folders, patterns such as ``dumps/*.jsonl``, or ``-`` alone for standard input. It is
                copied to a temporary file, which is deleted after the ``with`` block.

        Raises:
            ConfigError: an input does not exist or has an unsupported format, a pattern matches nothing, or ``-`` is
                not the only input.
        """
        if _STDIN in names:
            if len(names) > 1:
                raise ConfigError("standard input (-) must be the only input")
            with tempfile.NamedTemporaryFile(prefix="reward-loop-stdin-") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
                copy.flush()
                yield cls((Path(copy.name),), is_stdin=True)
            return
        paths = tuple(path for name in names for path in _matches(name))
        for path in paths:
            check_input(path)
        yield cls(paths)

    @property
    def name(self) -> str:
        """The inputs, for messages."""
        if self.is_stdin:
            return "standard input"
        more = len(self.paths) - 1
        return str(self.paths[0]) if not more else f"{self.paths[0]} and {more} more"

    @property
    def parquet(self) -> Path | None:
        """The only input, if it is a parquet file."""
        return self.paths[0] if len(self.paths) == 1 and is_parquet(self.paths[0]) else None

    def rows(self) -> Iterator[Row]:
        """Yield all rows. The index counts over all inputs; if there are several, the name of a row has its file."""
        index = 0
        for path in self.paths:
            for row in read_rows(path):
                yield replace(row, index=index, name=f"{path} {row.name}") if len(self.paths) > 1 else row
                index += 1

    def count(self) -> int:
        """Return the number of rows."""
        return sum(count_rows(path) for path in self.paths)

    def identity(self) -> dict[str, Any]:
        """Return what tells these inputs from other ones, or from their earlier content."""
        if self.is_stdin:
            with self.paths[0].open("rb") as copy:
                return {"path": _STDIN, "sha256": hashlib.file_digest(copy, "sha256").hexdigest()}
        stats = [file.stat() for path in self.paths for file in (files_of(path) if path.is_dir() else [path])]
        names = [str(path.resolve()) for path in self.paths]
        return {
            "path": names[0] if len(names) == 1 else names,
            "size": sum(stat.st_size for stat in stats),
            "mtime_ns": max(stat.st_mtime_ns for stat in stats),
        }

    def default_output(self) -> Path | None:
        """Return where the rows with their scores are written by default; ``None`` for stdout.

        Raises:
            ConfigError: there are several inputs.
        """
        if self.is_stdin:
            return None
        if len(self.paths) > 1:
            raise ConfigError(f"{len(self.paths)} inputs are scored: name their output with --output FILE")
        (path,) = self.paths
        if path.is_dir():
            return path.resolve().with_name(f"{path.resolve().name}.scored.jsonl")
        compression = path.suffix if path.suffix.lower() in SUFFIXES else ""
        plain = path.with_suffix("") if compression else path
        suffix = ".jsonl" if plain.suffix.lower() == ".json" and is_array(path) else plain.suffix
        return path.with_name(f"{plain.stem}.scored{suffix}{compression}")

    def partial_for_stdout(self) -> Path:
        """Return the path of the partial results of a run whose output goes to stdout."""
        if self.is_stdin:
            return Path("stdin.stdout.partial")
        return self.paths[0].with_name(f"{self.paths[0].stem}.stdout.partial")


def _matches(name: str) -> list[Path]:
    """Return the path, or the paths that match a pattern: 2.jsonl before 10.jsonl."""
    path = Path(name)
    if path.exists() or not glob.has_magic(name):
        return [path]
    found = glob.glob(str(path.expanduser()), recursive=True)
    if not found:
        raise ConfigError(f"no file matches {name}")
    return [Path(found_name) for found_name in sorted(found, key=_natural)]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key in which runs of digits are numbers."""
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
