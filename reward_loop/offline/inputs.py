"""The rollouts that a command reads: JSONL and parquet files, records, and verl's rollout dumps; which field of a row
becomes which part of a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import MISSING, decode, look_up, with_bytes
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.records import NoRecordsError, RecordsReader
from reward_loop.types import RewardSample, missing

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
    """A file or a folder of rollouts."""

    path: Path

    @classmethod
    def open(cls, name: str) -> Self:
        """Return the file or folder that a command line names; it exists.

        Raises:
            ConfigError: it does not exist, or is a folder without rollouts.
        """
        path = Path(name)
        if path.is_dir():
            if not _dumps(path):
                _records(path)
        elif not path.is_file():
            raise ConfigError(f"{path} is a pipe or a device" if path.exists() else f"no such file: {path}")
        return cls(path)

    def rows(self) -> Iterator[Row]:
        """Yield all rows."""
        return _read(self.path)

    def identity(self) -> dict[str, Any]:
        """Return what differs if this is another input, or if its content has changed."""
        # Not a hash of the content: the input may be very large.
        stats = [file.stat() for file in (_files(self.path) if self.path.is_dir() else [self.path])]
        return {
            "path": str(self.path.resolve()),
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


# `response_ids` stands before `response_length`, which is computed from it.
_OPTIONAL = ("prompt", "response_ids", "response_length", "is_truncated", "step", "training_progress", "validate")
_TARGETS = ("solution_str", "ground_truth", "data_source", "extra_info", "group", *_OPTIONAL)

_ARGUMENTS = {"global_steps": "step"}
"""Argument of functions -> the part of a sample that it has, if its name is another one."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "response_ids": Sequence,
    "response_length": int,
    "is_truncated": bool,
    "step": int,
    "training_progress": (int, float),
    "validate": bool,
}


class Fields:
    """The field mapping: which field of a row becomes which part of a sample."""

    def __init__(
        self,
        paths: Mapping[str, str] | None = None,
        *,
        data_source: str | None = None,
        requires: frozenset[str] = frozenset(),
    ) -> None:
        """Check the mapping.

        Args:
            paths: maps a part of the sample to a field of the row, which may be a dotted path. Parts are
                ``solution_str``, ``ground_truth``, ``data_source``, ``extra_info``, ``extra_info.KEY``, ``prompt``,
                ``response_ids``, ``response_length``, ``is_truncated``, ``step``, ``training_progress``, ``validate``,
                and for the records ``group``. The default field of a part is the field of the same name; of ``group``,
                also verl's ``uid``.
            data_source: one data source for all rows.
            requires: required parts; a row without one of them, or without its value, fails. ``solution_str`` and the
                fields in ``paths`` are always required. If ``paths`` has an ``extra_info.KEY``, the row needs no field
                ``extra_info``.

        Raises:
            ConfigError: a part does not exist, or both ``data_source`` and a path for it are given.
        """
        self.paths = dict(paths or {})
        self.data_source = data_source
        if data_source is not None and "data_source" in self.paths:
            raise ConfigError("--data-source and --field data_source contradict each other: leave one out")
        for target in self.paths:
            if target not in _TARGETS and not target.startswith("extra_info."):
                raise ConfigError(
                    f"a sample has no part {target!r}{did_you_mean(target, _TARGETS) or '.'} Its parts are "
                    f"{listing(_TARGETS)}, extra_info.KEY"
                )
        self._needs_value = {_ARGUMENTS.get(name, name) for name in requires} - {"solution_str"}
        self._requires = {"solution_str", *self.paths, *self._needs_value}
        if "extra_info" not in self.paths and any(target.startswith("extra_info.") for target in self.paths):
            self._requires.discard("extra_info")

    def to_sample(self, row: Row) -> RewardSample:
        """Return the sample of a row; if the row is malformed or lacks a required field, a sample with an error."""
        error = row.error
        if error is None:
            try:
                return RewardSample(
                    solution_str=self._text(row),
                    data_source=self.data_source
                    if self.data_source is not None
                    else str(self._get(row, "data_source", "")),
                    ground_truth=self._get(row, "ground_truth", None),
                    extra_info=self._extra_info(row),
                    uid=row.name,
                    group=self.group(row),
                    **self._optional(row),
                )
            except _FieldError as problem:
                error = str(problem)
        return RewardSample("", uid=row.name, error=error)

    def group(self, row: Row) -> str | None:
        """Return the group of a row; ``None`` if it has none."""
        group = self._get(row, "group", row.columns.get("uid") if "group" not in row.columns else None)
        return None if group is None else str(group)

    def _optional(self, row: Row) -> dict[str, Any]:
        """Return the parts that a row may lack. A field of another type is not used, unless the part is required."""
        found: dict[str, Any] = {}
        for name in _OPTIONAL:
            if name == "response_length" and found["response_ids"] is not None and self._path(name) not in row.columns:
                found[name] = len(found["response_ids"])
                continue
            value = self._get(row, name, None)
            if value is not None and name in _TYPES and not _is(value, _TYPES[name]):
                if name in self._requires:
                    raise _FieldError(f"field {self._path(name)!r} is {shorten(value, 60)}, not a valid {name}")
                value = None
            found[name] = value
        found["validate"] = bool(found["validate"])
        return found

    def _text(self, row: Row) -> str:
        value = self._get(row, "solution_str", None)
        if not isinstance(value, str):
            raise _FieldError(f"field {self._path('solution_str')!r} is {shorten(value, 60)}, not text")
        return value

    def _extra_info(self, row: Row) -> dict[str, Any]:
        value = self._get(row, "extra_info", None)
        if value is not None and not isinstance(value, Mapping):
            raise _FieldError(f"field {self._path('extra_info')!r} is {shorten(value, 60)}, not an object")
        extra_info = dict(value or {})
        for target in self.paths:
            if target.startswith("extra_info."):
                extra_info[target.removeprefix("extra_info.")] = self._get(row, target, None)
        return extra_info

    def _get(self, row: Row, target: str, default: Any) -> Any:
        path = self._path(target)
        value = look_up(row.columns, path)
        if value is not MISSING:
            if not missing(value):
                return value
            if target in self._needs_value:
                raise _FieldError(
                    f"field {path!r} has no value, and the function requires {target}: {shorten(value, 60)}"
                )
            return default
        if target in self._requires:
            raise _FieldError(
                f"no field {path!r} (for {target}){did_you_mean(path, row.columns) or '.'} "
                f"Its fields are {listing(row.columns)}: name the right one by --field {target}=..."
            )
        return default

    def _path(self, target: str) -> str:
        return self.paths.get(target, target)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether a value has a type; a bool is not a number here, and a text no list."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) and not isinstance(value, str)


class _FieldError(Exception):
    """A row lacks a required field, or the field has the wrong type."""


def check_fields(rows: Iterable[Row], source: str, fields: Fields) -> None:
    """Check that the field mapping fits at least one of the rows. Reading stops at the first row that fits.

    Raises:
        ConfigError: the mapping fits no row; the message contains ``source`` and the error of the first row.
    """
    first, count = "", 0
    for row in rows:
        error = fields.to_sample(row).error
        if error is None:
            return
        first = first or f"{row.name}: {error}"
        count += 1
    if count:
        raise ConfigError(f"{source}: none of the {count} rows can be scored. {first}")
