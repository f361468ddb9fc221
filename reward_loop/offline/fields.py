"""The field mapping: which field of a row becomes which part of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reward_loop._util.json import MISSING, look_up
from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import ConfigError
from reward_loop.offline.inputs import Row
from reward_loop.types import RewardSample, missing

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
            keys = {
                "extra_info": ", or set single keys of it by --field extra_info.KEY=...",
                "data_source": ", or one source for all rows by --data-source NAME",
            }.get(target, "")
            raise _FieldError(
                f"no field {path!r} (for {target}){did_you_mean(path, row.columns) or '.'} "
                f"Its fields are {listing(row.columns)}: name the right one by --field {target}=...{keys}"
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
