"""Reads a records folder, also while processes write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_loop._util.json import decode
from reward_loop.errors import ConfigError
from reward_loop.records.files import SAMPLE, VERSION

# At most 18 digits: `int` refuses numbers with thousands of them.
_STEP = re.compile(rb'"(?:generated_)?step":\s*(-?\d{1,18})\b')


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; ``None`` if the line is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        found = decode(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_files(
    folder: Path, is_wanted: Callable[[bytes], Any] | None = None
) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the file of each line in a folder, and the object in the line; ``None`` for an incomplete line.

    Nothing if there is no such folder. ``is_wanted`` selects the lines to parse; by default all.

    Raises:
        ConfigError: a newer version has written them.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                if is_wanted is None or is_wanted(line):
                    row = parse_line(line)
                    check_version((row or {}).get("version", 0), path)
                    yield path, row


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in all files of a folder, without incomplete lines; raises as `read_files` does."""
    return (row for _, row in read_files(folder) if row is not None)


def has_step(line: bytes, steps: Collection[int]) -> bool:
    """Return whether a line, which is not parsed, has one of some steps as ``step`` or ``generated_step``."""
    return any(int(step) in steps for step in _STEP.findall(line))


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


class NoRecordsError(ConfigError):
    """A folder does not exist, or contains no records."""


class RecordsReader:
    """The records in a folder.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: a newer version has written them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.incomplete = 0
        """Lines that could not be read in the last pass over the rows: of processes that were killed, or are writing
        them."""
        if not folder.is_dir():
            why = "it is a file" if folder.exists() else "it does not exist"
            raise NoRecordsError(f"{folder} is not a folder of records: {why}")
        if not any(True for _ in self._lines()):
            raise NoRecordsError(
                f"{folder} contains no records. A verl run writes them to trainer.default_local_dir/rewards, other "
                "runs to the folder in reward_loop.log_dir"
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of all samples as they were written.

        `reward_loop.index` has those that count: after a resume, some samples are scored again.
        """
        self.incomplete = 0
        return (row for row in self._lines() if row["kind"] == SAMPLE)

    def text(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the texts of a sample: prompt, response, ground truth, extra info and large components.

        ``None`` if they were not recorded, or have been deleted.
        """
        lines = self._read(row, "text")
        # A segment that is deleted while its process still writes to it begins again, with other texts at this offset.
        return lines[0] if lines and lines[0].get("id") == row.get("id") else None

    def exchanges(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the exchanges of a sample with model servers; without their texts if these have been deleted."""
        lines = [line for line in self._read(row, "exchange") if line.get("sample") == row.get("id")]
        return lines or list(row.get("judges") or ())

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the rows in all files."""
        for _, row in read_files(self.folder):
            if row is None:
                self.incomplete += 1
            elif "kind" in row and isinstance(row.get("version"), int):  # otherwise, not a file of records
                yield row

    def _read(self, row: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
        name = row.get(f"{kind}_file")
        if name is None:
            return []
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            return []  # not written by this library
        try:
            with path.open("rb") as file:
                file.seek(row[f"{kind}_offset"])
                content = file.read(row[f"{kind}_bytes"])
        except OSError:
            return []
        parsed = (parse_line(line) for line in content.splitlines(keepends=True))
        return [line for line in parsed if line is not None]
