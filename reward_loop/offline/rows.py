"""Reads the rows of a rollout file, and makes a sample from each row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_loop._util.paths import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.offline.compression import SUFFIXES
from reward_loop.offline.contents import read_contents
from reward_loop.offline.folders import count_folder, read_folder, renamed
from reward_loop.offline.parquet import parquet_rows, read_batches, rows_of
from reward_loop.types import RewardSample

__all__ = ["Fields", "Row", "check_fields", "check_format", "check_input", "count_rows", "is_parquet", "read_rows"]

_OTHER_FORMATS = frozenset({".arrow", ".bz2", ".csv", ".feather", ".ods", ".tsv", ".xls", ".xlsx", ".xz", ".zip"})
_MAX_DEPTH = 200
"""The largest number of levels of objects and lists in a row: Python's recursion limit bounds what can be copied and
written."""
_TARGETS = ("solution_str", "ground_truth", "data_source", "extra_info")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input."""

    index: int
    """Index of the row, from 0; blank lines are not counted."""
    name: str
    """Name in messages: ``line 7`` in a JSONL file, ``row 6`` in a JSON array or a parquet file, in a folder the
    ``uid`` if there is one."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    sample: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the `RewardSample` that are not parts for the function: in a folder, group, step and prompt."""
    error: str | None = None
    """Why the row cannot be read; ``None`` if it can."""


def is_parquet(path: Path) -> bool:
    """Whether the file has a parquet suffix; all other files are read as JSONL or as a JSON array."""
    return path.suffix.lower() in (".parquet", ".pq")


def check_format(path: Path) -> None:
    """Refuse the suffix of an unsupported format, such as CSV, with a `ConfigError`."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        plain = path.with_suffix("")
        if is_parquet(plain) or plain.suffix.lower() in _OTHER_FORMATS:
            raise ConfigError(f"{path}: only JSONL and JSON arrays can be compressed, and not {plain.suffix}")
    elif suffix in _OTHER_FORMATS:
        raise ConfigError(f"{path}: rollouts are JSONL, or parquet by the suffix .parquet, and not {path.suffix}")


def check_input(path: Path) -> None:
    """Check that the path is a folder with rollouts, or a regular file of a supported format.

    Raises:
        ConfigError: the path does not exist, is a pipe or a device, has an unsupported suffix, or is a folder without
            rollouts.
    """
    if path.is_dir():
        next(read_folder(path), None)
        return
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file of rollouts: it is a pipe or device")
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    check_format(path)


def count_rows(path: Path) -> int:
    """Return the number of rows that `read_rows` yields. Raises its errors."""
    if is_parquet(path):
        return parquet_rows(path)
    if path.is_dir():
        return count_folder(path)
    return sum(1 for _ in read_contents(path))


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a folder. A malformed line becomes a row with an error.

    Raises:
        ConfigError: the folder cannot be read, or the file cannot be decompressed, or read as parquet or as a JSON
            array.
    """
    if path.is_dir():
        for index, (content, error) in enumerate(read_folder(path)):
            yield _stored(index, content, error)
        return
    if is_parquet(path):
        found = (columns for batch in read_batches(path) for columns in rows_of(path, batch))
        yield from (Row(index, f"row {index}", columns) for index, columns in enumerate(found))
        return
    for index, (name, content) in enumerate(read_contents(path)):
        yield _parse(index, name, content)


def _parse(index: int, name: str, content: Any) -> Row:
    columns = content
    if isinstance(content, bytes):
        try:
            columns = json.loads(content)
        except (ValueError, RecursionError) as error:
            return Row(index, name, error=f"not JSON: {error}")
    if not isinstance(columns, dict):
        return Row(index, name, error=f"expected a JSON object with named fields, got {shorten(columns, 60)}")
    if (problem := _too_deep(columns)) is not None:
        return Row(index, name, error=problem)
    return Row(index, name, columns)


def _too_deep(columns: Mapping[str, Any]) -> str | None:
    """Return the error of a row whose fields are nested too deeply; ``None`` if they are not."""
    level: list[Any] = [columns]
    for _ in range(_MAX_DEPTH):
        items = (item for value in level for item in (value.values() if isinstance(value, dict) else value))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return None
    return f"its fields are nested more than {_MAX_DEPTH} levels deep"


def _stored(index: int, content: Mapping[str, Any] | bytes, error: str | None) -> Row:
    if isinstance(content, bytes):
        row = _parse(index, f"row {index}", content)
        columns, error = renamed(row.columns), row.error
    else:
        columns = dict(content)
        error = error or _too_deep(columns)
    uid, step = columns.get("uid"), columns.get("step")
    known = {name: columns[name] for name in ("prompt", "group") if columns.get(name) is not None}
    if isinstance(step, int):
        known["step"] = step
    return Row(index, str(uid or f"row {index}"), columns, known, error)


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
                ``solution_str``, ``ground_truth``, ``data_source``, ``extra_info`` and ``extra_info.KEY``. The default
                field of a part is the field of the same name.
            data_source: one data source for all rows.
            requires: required parts; a row without one of them fails. ``solution_str`` and the parts in ``paths`` are
                always required. If ``paths`` has an ``extra_info.KEY``, the row needs no field ``extra_info``.

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
        self._requires = {"solution_str", *self.paths, *requires}
        if "extra_info" not in self.paths and any(target.startswith("extra_info.") for target in self.paths):
            self._requires.discard("extra_info")

    def to_sample(self, row: Row) -> RewardSample:
        """Return the sample of a row; if the row is malformed or lacks a required field, a sample with an error."""
        if row.error is not None:
            return RewardSample("", uid=row.name, error=row.error)
        try:
            return RewardSample(
                solution_str=self._text(row),
                data_source=self.data_source
                if self.data_source is not None
                else str(self._get(row, "data_source", "")),
                ground_truth=self._get(row, "ground_truth", None),
                extra_info=self._extra_info(row),
                uid=row.name,
                **row.sample,
            )
        except _FieldError as error:
            return RewardSample("", uid=row.name, error=str(error))

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
            return value
        if target in self._requires:
            keys = ", or set single keys of it by --field extra_info.KEY=..." if target == "extra_info" else ""
            raise _FieldError(
                f"no field {path!r} (for {target}){did_you_mean(path, row.columns) or '.'} "
                f"Its fields are {listing(row.columns)}: name the right one by --field {target}=...{keys}"
            )
        return default

    def _path(self, target: str) -> str:
        return self.paths.get(target, target)


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
