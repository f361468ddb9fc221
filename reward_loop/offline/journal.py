"""The journal beside the output: what an interrupted run has done already."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from reward_loop._util.json import to_json
from reward_loop.errors import ConfigError
from reward_loop.types import RESERVED_KEYS, Outcome

__all__ = ["Journal", "differences"]


class Journal:
    """A JSONL file: a header that says which run it belongs to, and a record for every completed row.

    Each record is written whole, in one piece, as soon as its row is done. A torn last line, left by a kill or a full
    disk, is cut off when the journal is opened again.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, restart: bool = False) -> None:
        """Open or create the journal.

        Args:
            path: where it lies.
            header: the run's input, function and options.
            restart: discard what is in it.

        Raises:
            ConfigError: it holds results of another run, or another process is writing it.
        """
        self.path = path
        self._offsets: dict[int, int] = {}
        self._file = path.open("a+b", buffering=0)
        try:
            self._lock()
            if restart:  # no sooner: it may be that of a run that goes on
                self._file.truncate(0)
            self._recover(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, row: object) -> bool:
        return row in self._offsets

    def __getitem__(self, row: int) -> dict[str, Any]:
        self._file.seek(self._offsets[row])
        # The file is unbuffered for its writers' sake, and readline without a buffer reads byte by byte.
        data = self._file.read(4096)
        while b"\n" not in data:
            data += self._file.read(max(4096, len(data)))
        record: dict[str, Any] = json.loads(data[: data.index(b"\n")])
        return record

    def append(self, row: int, record: Mapping[str, Any]) -> None:
        """Write the record of a completed row."""
        try:
            line = to_json({"row": row, **record})
        except Exception as error:  # a value whose str() raises, or one that holds itself
            info = {key: value for key, value in record["reward_extra_info"].items() if key in RESERVED_KEYS}
            info["record_error"] = f"{type(error).__name__}: {error}"
            line = to_json({"row": row, **record, "reward_extra_info": info})
        offset = self._file.seek(0, 2)
        self._write(line)
        self._offsets[row] = offset

    def forget_failed(self) -> None:
        """Mark the failed rows as not done; a later record of a row replaces the earlier one."""
        self._offsets = {row: at for row, at in self._offsets.items() if self[row]["outcome"] != Outcome.FAILED}

    def delete(self) -> None:
        """Remove the file: the output is complete."""
        self.path.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        left = memoryview(line + b"\n")
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            error.filename = str(self.path)  # "No space left on device" alone does not say on which
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
                record = _parse(line)
                if record is None:
                    break
                if good == 0:
                    changed = differences(header, record)
                elif changed and record["outcome"] != Outcome.FAILED:
                    raise ConfigError(
                        f"{self.path} holds an interrupted run that had another {changed}. Run the old command to "
                        "finish that, or start over: --restart"
                    )
                else:
                    self._offsets[record["row"]] = good
                good += len(line)
        if changed:  # all rows of the other run failed: the file contains no result
            self._offsets.clear()
            good = 0
        self._file.truncate(good)
        if good == 0:
            self._write(to_json(header))


def differences(header: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Name what differs between the headers of two runs; an empty string if nothing does."""
    header = json.loads(to_json(header))  # tuples become lists, for example, as in the header that was read
    changed = [key for key in header.keys() | found.keys() if header.get(key) != found.get(key)]
    return " and another ".join(sorted(changed))


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record of a whole line, None for a torn one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
