"""The rollouts that a command reads: JSONL and parquet files, records, and verl's rollout dumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import decode, with_bytes
from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError
from reward_loop.records import NoRecordsError, RecordsReader

_DUMPED = {"input": "prompt", "output": "solution_str", "gts": "ground_truth"}
"""The name of a field in verl's dumps -> its name in a row."""

_KEPT = ("uid", "group", "step", "validate", "data_source", "outcome", "score")
"""The fields of a record that are kept in a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the inputs."""

    name: str
    """The name in messages, and the ``uid`` of its record; different for all rows. ``line 7`` in a JSONL file, ``row
    6`` in a parquet file and in dumps, the ``uid`` in records."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the row cannot be read; ``None`` if it can."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """One or several inputs, which are read one after the other as if they were one file."""

    paths: tuple[Path, ...]

    @classmethod
    def open(cls, names: Sequence[str]) -> Self:
        """Return the files and folders that a command line names, each once; each exists.

        Raises:
            ConfigError: an input does not exist, or is a folder without rollouts.
        """
        # Once, as two rows of one name would share a record.
        paths: dict[Path, Path] = {}
        for path in map(Path, names):
            if path.is_dir():
                if not _dumps(path):
                    _records(path)
            elif not path.is_file():
                raise ConfigError(f"{path} is a pipe or a device" if path.exists() else f"no such file: {path}")
            paths.setdefault(path.resolve(), path)
        return cls(tuple(paths.values()))

    @property
    def name(self) -> str:
        """The inputs, for messages."""
        more = len(self.paths) - 1
        return str(self.paths[0]) if not more else f"{self.paths[0]} and {more} more"

    def rows(self) -> Iterator[Row]:
        """Yield all rows. If there are several inputs, the name of a row begins with that of its file."""
        for path in self.paths:
            for row in _read(path):
                yield replace(row, name=f"{path} {row.name}") if len(self.paths) > 1 else row

    def count(self) -> int:
        """Return the number of rows."""
        return sum(_count(path) for path in self.paths)

    def identity(self) -> dict[str, Any]:
        """Return what tells these inputs from other ones, or from their earlier content."""
        # Not a hash of the content: the inputs may be very large.
        stats = [file.stat() for path in self.paths for file in (_files(path) if path.is_dir() else [path])]
        return {
            "path": [str(path.resolve()) for path in self.paths],
            "size": sum(stat.st_size for stat in stats),
            "mtime_ns": max(stat.st_mtime_ns for stat in stats),
        }


def _is_parquet(path: Path) -> bool:
    # Folders, such as of records, may have any name.
    return path.suffix.lower() in (".parquet", ".pq") and not path.is_dir()


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a parquet file, each of at most 1024 rows.

    Raises:
        ConfigError: pyarrow is not installed, or cannot read the file.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"{path}: parquet files need pyarrow: pip install pyarrow") from error
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=1024)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as parquet: {error}") from error


def _count(path: Path) -> int:
    if _is_parquet(path):
        return sum(batch.num_rows for batch in _batches(path))
    if path.is_dir() and not _dumps(path):
        return sum(1 for _ in _records(path).rows())
    return sum(1 for _ in _lines(path))


def _read(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a folder. A malformed line becomes a row with an error."""
    if _is_parquet(path):
        found = (columns for batch in _batches(path) for columns in batch.to_pylist())
        yield from (Row(f"row {index}", columns) for index, columns in enumerate(found))
    elif path.is_dir() and not _dumps(path):
        yield from _recorded(path)
    elif path.is_dir():
        for index, (_, line) in enumerate(_lines(path)):
            row = _parse(f"row {index}", line)
            yield replace(row, columns={_DUMPED.get(name, name): value for name, value in row.columns.items()})
    else:
        yield from (_parse(f"line {number}", line) for number, line in _lines(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSONL file, or of a folder of dumps, that are not blank, and their numbers from 1."""
    for file in _dumps(path) if path.is_dir() else [path]:
        try:
            with file.open("rb") as lines:
                yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error


def _parse(name: str, line: bytes) -> Row:
    try:
        # Python's `json`, with which verl dumps rollouts, writes NaN.
        columns = decode(line, nan=True)
    except ValueError as error:
        return Row(name, error=f"not JSON, with one object in each line, and the file is not named .parquet: {error}")
    if not isinstance(columns, dict):
        return Row(name, error=f"expected a JSON object with named fields, got {shorten(columns, 60)}")
    return Row(name, columns)


def _recorded(folder: Path) -> Iterator[Row]:
    """Yield the samples of records. If several have the same ``uid``, all but the first have a number after it."""
    from reward_loop.index.index import open_index  # it imports DuckDB

    reader = _records(folder)
    seen = Counter[str]()
    with open_index(folder) as index:
        for number, row in enumerate(index.records()):
            name = uid = str(row.get("uid") or f"row {number}")
            # A uid may itself end in such a number: records of an earlier scoring have these names as uids.
            while name in seen:
                seen[uid] += 1
                name = f"{uid} ({seen[uid]})"
            seen[name] = 1
            yield recorded_row(reader, row, name)


def recorded_row(reader: RecordsReader, row: Mapping[str, Any], name: str) -> Row:
    """Return a sample of records with its texts; without them, a row with an error."""
    columns = {key: row.get(key) for key in _KEPT}
    text = reader.text(row)
    if text is None:
        return Row(name, columns, error="its texts were not recorded, or have been deleted: see reward_loop.record")
    parts = {key: text.get(key) for key in ("prompt", "ground_truth", "extra_info")}
    columns |= {"solution_str": text.get("response"), **{key: with_bytes(part) for key, part in parts.items()}}
    return Row(name, columns)


def _records(folder: Path) -> RecordsReader:
    try:
        return RecordsReader(folder)
    except NoRecordsError as error:
        raise ConfigError(
            f"{folder} is not a file of rollouts: it is a folder with neither records nor rollout dumps of verl "
            "(STEP.jsonl)"
        ) from error


def _files(folder: Path) -> list[Path]:
    """Return the files that contain the rows of a folder."""
    return _dumps(folder) or sorted(folder.glob("*.jsonl"))


def _dumps(folder: Path) -> list[Path]:
    """Return the files of a folder of verl's rollout dumps, which are named after the steps."""
    return sorted((path for path in folder.glob("*.jsonl") if path.stem.isdecimal()), key=lambda path: int(path.stem))
