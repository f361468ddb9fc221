"""The file of partial results: the results of the completed rows of a run, so that it can be resumed."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import to_json
from reward_loop.errors import ConfigError
from reward_loop.records.lines import parse_line
from reward_loop.types import RESERVED_KEYS, Outcome

__all__ = ["PartialResults", "differences"]


_BEGIN = b'{"journal"'
"""The first bytes of the header line."""


class PartialResults:
    """A JSONL file with a header line that identifies the run, and one record for each completed row.

    Invariants:

    - A record is written as one line, as soon as its row is complete.
    - An incomplete last line, left by a killed process or a full disk, is removed when the file is opened again.
    - If a row has several records, the last one is valid.
    - Only one process writes the file; it holds an exclusive lock.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, restart: bool = False) -> None:
        """Open or create the file.

        Args:
            path: the file.
            header: the run's input file, function and options; its first key is ``journal``.
            restart: whether to discard the content of an existing file.

        Raises:
            ConfigError: the file contains results of a different run or other data, or another process has it open.
        """
        self.path = path
        self._offsets: dict[int, int] = {}
        self._file = path.open("a+b", buffering=0)
        try:
            self._lock()
            if restart:  # only with the lock: another process may be writing the file
                self._file.truncate(0)
            self._recover(header)
            # Reads of the unbuffered file would read lines byte by byte.
            self._lines = path.open("rb")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, row: object) -> bool:
        return row in self._offsets

    def __getitem__(self, row: int) -> dict[str, Any]:
        self._lines.seek(self._offsets[row])
        record: dict[str, Any] = json.loads(self._lines.readline())
        return record

    def append(self, row: int, record: Mapping[str, Any]) -> None:
        """Write the record of a completed row."""
        try:
            line = to_json({"row": row, **record})
        except Exception as error:  # a value whose str() raises, or a value that contains itself
            info = {key: value for key, value in record["reward_extra_info"].items() if key in RESERVED_KEYS}
            info["record_error"] = f"{type(error).__name__}: {error}"
            line = to_json({"row": row, **record, "reward_extra_info": info})
        offset = self._file.seek(0, 2)
        self._write(line)
        self._offsets[row] = offset

    def forget_failed(self) -> None:
        """Mark the failed rows as not completed. Their next record replaces the old one."""
        self._offsets = {row: at for row, at in self._offsets.items() if self[row]["outcome"] != Outcome.FAILED}

    def delete(self) -> None:
        """Remove the file; called when the output is complete."""
        self.path.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        left = memoryview(line + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            error.filename = str(self.path)  # "No space left on device" does not include the path
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing {self.path}: wait for it, or choose another output") from None

    def _recover(self, header: Mapping[str, Any]) -> None:
        good, changed = 0, ""
        with self.path.open("rb") as lines:
            for line in lines:
                begin = line.strip(b"\0\n")[: len(_BEGIN)]  # a crash of the machine may leave zeros
                if good == 0 and not _BEGIN.startswith(begin):
                    raise ConfigError(
                        f"{self.path} was not written by this command: rename it, or discard it with --restart"
                    )
                record = parse_line(line)
                if record is None:
                    break
                if good == 0:
                    changed = differences(header, record)
                elif changed and record.get("outcome") != Outcome.FAILED:
                    raise ConfigError(
                        f"{self.path} contains the results of an interrupted run with another {changed}. Rerun the old "
                        "command to finish it, or discard it with --restart"
                    )
                else:
                    self._offsets[record["row"]] = good
                good += len(line)
        if changed:  # all rows of the different run failed: there are no results to keep
            self._offsets.clear()
            good = 0
        self._file.truncate(good)
        if good == 0:
            self._write(to_json(header))


def differences(header: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the names of the fields that differ between two headers; an empty string if the headers are equal."""
    header = json.loads(to_json(header))  # converts tuples to lists, for example, as in the header read from the file
    changed = [key for key in header.keys() | found.keys() if header.get(key) != found.get(key)]
    return " and another ".join(sorted(changed))
