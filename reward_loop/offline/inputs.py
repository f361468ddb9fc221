"""The rollouts that a command reads: JSONL and parquet files, and records; which field of a row becomes which part of a
sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_loop._util.json import MISSING, decode, look_up, with_bytes
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.records import TEXTS, RecordsReader
from reward_loop.types import RewardSample, missing

_KEPT = ("uid", "group", "step", "validate", "data_source", "outcome", "score")
"""The fields of a record that are kept in a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the inputs."""

    name: str
    """The name in messages, and the ``uid`` of its record; different for all rows. ``line 7`` in a JSONL file, ``row
    6`` in a parquet file, the ``uid`` in records."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why the row cannot be read; ``None`` if it can."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A file or a folder of rollouts.

    Raises:
        ConfigError: it does not exist, or is a folder without rollouts.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir() and not self.path.is_file():
            raise ConfigError(f"no such file: {self.path}, or it is a pipe")
        if self.path.is_dir():
            RecordsReader(self.path)  # checks that the folder contains records

    def rows(self) -> Iterator[Row]:
        """Yield all rows. A malformed line becomes a row with an error."""
        if self.path.is_dir():
            yield from _recorded(self.path)
        elif self.path.suffix.lower() == ".parquet":
            from reward_loop.index.index import parquet_rows  # it imports DuckDB

            for index, columns in enumerate(parquet_rows(self.path)):
                yield Row(f"row {index}", columns)
        else:
            with self.path.open("rb") as lines:
                yield from (_parse(f"line {n}", line) for n, line in enumerate(lines, start=1) if line.strip())

    def identity(self) -> list[Any]:
        """Return what differs if this is another input, or if its content has changed."""
        # Not a hash of the content: the input may be very large.
        files = sorted(self.path.glob("*.jsonl")) or [self.path]
        stats = [(file.name, file.stat()) for file in files]
        return [str(self.path.resolve()), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]


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

    reader = RecordsReader(folder)
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


@dataclass(slots=True)
class Recorded:
    """Recorded answers, chosen by chance, and what was seen of the others."""

    rows: list[Row]
    samples: int
    """The scored samples of the records."""
    latest: float
    """The time of the last of them."""
    with_texts: int
    """Those of them whose texts the records still have."""
    low: float
    high: float
    """The bounds of all recorded scores."""
    address: str | None
    """``host:port`` of the run's judge: of the last answer through the router, else the only address that was asked."""


def choose_recorded(folder: Path, count: int, after: float = 0.0) -> Recorded:
    """Choose answers that were recorded later than ``after``; the same in each call.

    Raises:
        ConfigError: the folder has no records.
    """
    from reward_loop.index import questions  # it imports DuckDB
    from reward_loop.index.index import open_index

    reader = RecordsReader(folder)
    # Whole files are deleted, the oldest first.
    left = [path.relative_to(folder).as_posix() for path in (folder / TEXTS).glob("*.jsonl")]
    with open_index(folder) as index:
        counts, chosen = questions.scored(index, left, count, after)
        rows = [recorded_row(reader, row, str(row.get("uid") or row["id"])) for row in chosen]
        return Recorded(rows, **counts, address=questions.judge_address(index))


_PARTS: dict[str, Any] = {
    **dict.fromkeys(("solution_str", "ground_truth", "data_source", "extra_info", "group", "prompt"), object),
    "solution_str": str,
    "extra_info": Mapping,
    "response_ids": Sequence,
    "response_length": int,
    "is_truncated": bool,
    "step": int,
    "training_progress": int | float,
    "validate": bool,
}
"""The parts of a sample, and their types."""

_ARGUMENTS = {"global_steps": "step"}
"""Argument of functions -> the part of a sample that it has, if its name is another one."""


class Fields:
    """The field mapping: which field of a row becomes which part of a sample."""

    def __init__(
        self,
        paths: Mapping[str, str] | None = None,
        *,
        requires: frozenset[str] = frozenset(),
    ) -> None:
        """Check the mapping.

        Args:
            paths: maps a part of the sample to a field of the row, which may be a dotted path. Parts are
                ``solution_str``, ``ground_truth``, ``data_source``, ``extra_info``, ``extra_info.KEY``, ``prompt``,
                ``response_ids``, ``response_length``, ``is_truncated``, ``step`` (or ``global_steps``),
                ``training_progress``, ``validate``, and for the records ``group``. The default field of a part is the
                field of the same name; of ``group``, also verl's ``uid``.
            requires: required parts; a row without one of them, or without its value, fails. ``solution_str`` and the
                fields in ``paths`` are always required. If ``paths`` has an ``extra_info.KEY``, the row needs no field
                ``extra_info``.

        Raises:
            ConfigError: a part does not exist.
        """
        self.paths = {_ARGUMENTS.get(target, target): path for target, path in (paths or {}).items()}
        self._keys = [target for target in self.paths if target.startswith("extra_info.")]
        for target in self.paths:
            if target not in (*_PARTS, *self._keys):
                raise ConfigError(
                    f"a sample has no part {target!r}{did_you_mean(target, _PARTS) or '.'} Its parts are "
                    f"{listing(_PARTS)}, extra_info.KEY"
                )
        needed = {_ARGUMENTS.get(name, name) for name in requires} | {"solution_str"}
        self._needs_value = needed - {"extra_info"} if self._keys else needed
        self._requires = {*self.paths, *self._needs_value}

    def to_sample(self, row: Row) -> RewardSample:
        """Return the sample of a row; if the row is malformed or lacks a required field, a sample with an error."""
        if row.error is not None:
            return RewardSample("", uid=row.name, error=row.error)
        try:
            found = {name: self._get(row, name) for name in _PARTS}
            keys = {target.removeprefix("extra_info."): self._get(row, target) for target in self._keys}
        except _FieldError as problem:
            return RewardSample("", uid=row.name, error=str(problem))
        found["extra_info"] = {**(found["extra_info"] or {}), **keys}
        found["validate"] = bool(found["validate"])
        found["data_source"] = "" if found["data_source"] is None else str(found["data_source"])
        if found["group"] is None and "group" not in row.columns:
            found["group"] = row.columns.get("uid")
        if found["group"] is not None:
            found["group"] = str(found["group"])
        return RewardSample(**found, uid=row.name)

    def _get(self, row: Row, target: str) -> Any:
        """Return a part of a sample; ``None`` without it, or if its type is another one and it is not required."""
        path, kind = self.paths.get(target, target), _PARTS.get(target, object)
        value = look_up(row.columns, path)
        if target == "response_length" and value is MISSING and target not in self.paths:
            ids = self._get(row, "response_ids")
            value = MISSING if ids is None else len(ids)
        if value is MISSING and target in self._requires:
            raise _FieldError(
                f"no field {path!r} (for {target}){did_you_mean(path, row.columns) or '.'} "
                f"Its fields are {listing(row.columns)}: name the right one by --field {target}=..."
            )
        if value is MISSING or missing(value):
            if target in self._needs_value:
                raise _FieldError(
                    f"field {path!r} has no value, and the function requires {target}: {shorten(value, 60)}"
                )
            return None
        # A bool is an int, and a text a sequence, but neither is meant.
        if isinstance(value, kind) and (kind in (object, str, bool) or not isinstance(value, bool | str)):
            return value
        if target in self._requires or kind is Mapping:
            raise _FieldError(f"field {path!r} is {shorten(value, 60)}, not a valid {target}")
        return None


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
    raise ConfigError(f"{source}: " + (f"none of the {count} rows can be scored. {first}" if count else "no rows"))
