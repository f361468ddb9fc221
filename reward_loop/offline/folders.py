"""Reads the rollouts in a folder: records, or verl's rollout dumps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.records.reader import NoRecordsError, RecordsReader

__all__ = ["count_folder", "files_of", "read_folder", "renamed"]

_DUMPED = {"input": "prompt", "output": "solution_str", "gts": "ground_truth"}
"""The name of a field in verl's dumps -> its name in a row."""

_KEPT = ("uid", "group", "step", "validate", "data_source", "outcome", "score")
"""The fields of a record that are kept in a row."""


def files_of(folder: Path) -> list[Path]:
    """Return the files that contain the rows of a folder, in the order in which they are read."""
    return _dumps(folder) or sorted(folder.glob("*.jsonl"))


def read_folder(folder: Path) -> Iterator[tuple[Mapping[str, Any] | bytes, str | None]]:
    """Yield the fields of each rollout, or the line of a dump, and why it cannot be scored.

    Args:
        folder: records, or verl's ``trainer.rollout_data_dir`` or ``trainer.validation_data_dir``, whose files are
            named after the steps.

    Raises:
        ConfigError: the folder contains neither.
    """
    if dumps := _dumps(folder):
        yield from ((line, None) for line in _lines(dumps))
        return
    reader = _reader(folder)
    for row in reader.rows():
        text = reader.text(row)
        kept = {name: row.get(name) for name in _KEPT}
        if text is None:
            yield kept, "its texts were not recorded, or have been deleted: see reward_loop.record"
        else:
            response, names = text.get("response"), ("prompt", "ground_truth", "extra_info")
            yield {**kept, "solution_str": response, **{name: text.get(name) for name in names}}, None


def count_folder(folder: Path) -> int:
    """Return the number of rollouts in a folder. Raises the errors of `read_folder`."""
    if dumps := _dumps(folder):
        return sum(1 for _ in _lines(dumps))
    return sum(1 for _ in _reader(folder).rows())


def renamed(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dumped rollout with the names of the parts of a sample."""
    return {_DUMPED.get(name, name): value for name, value in columns.items()}


def _reader(folder: Path) -> RecordsReader:
    try:
        return RecordsReader(folder)
    except NoRecordsError as error:
        raise ConfigError(
            f"{folder} is not a file of rollouts: it is a folder with neither records nor rollout dumps of verl "
            "(STEP.jsonl)"
        ) from error


def _lines(dumps: Iterable[Path]) -> Iterator[bytes]:
    """Yield the lines of dumps that are not blank."""
    for path in dumps:
        with path.open("rb") as lines:
            yield from (line for line in lines if line.strip())


def _dumps(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("*.jsonl") if path.stem.isdecimal()), key=lambda path: int(path.stem))
