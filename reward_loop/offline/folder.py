"""The folder of records that one `reward-loop score` writes, and that a later one resumes; the export of its scores."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import to_json
from reward_loop.errors import ConfigError
from reward_loop.offline.inputs import Inputs
from reward_loop.records import (
    SUB_FOLDERS,
    NoRecordsError,
    RecordsReader,
    parse_line,
    records,
)
from reward_loop.types import Outcome

_FLUSH_S = 600.0
"""Seconds within which all records must be on the disk at the end."""

RUN = "run.json"
"""The file with the digests of what decides about the scores."""

MAX_BYTES = 2**62
"""The largest size of the folder: nothing is deleted."""

COLUMNS = ("score", "outcome", "error", "components")
"""The fields that are added: the score after the policy, and what the record of the row contains. An input field of
the same name is renamed to ``input_<name>``."""


class ScoredFolder:
    """A folder of records with one record for each row that has been scored. A row's name is the record's ``uid``.

    Invariants:

    - Only one process writes the folder: it locks it.
    - All records are of one run: the file `RUN` identifies its input, function and options.
    - A record that cannot be written is an error. One that a killed process could not complete is left out by readers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = records(path, MAX_BYTES)
        """This process's writer of records. Its path is absolute: a function may change the working directory."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, identity: Mapping[str, Any], *, restart: bool = False) -> Iterator[Self]:
        """Yield the folder of a run, new or resumed; it is locked within ``with``.

        Args:
            path: the folder; it is created.
            identity: what decides about the scores: input, function and options.
            restart: whether to discard the records of an earlier run.

        Raises:
            ConfigError: the folder contains anything else, or the records of a different run with a score, or another
                process writes it.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {path}: the folder cannot be created: {error.strerror}") from error
        # The folder itself is locked, so no file is left behind; the kernel ends the lock of a killed process.
        lock = os.open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run is writing {path}: wait for it, or choose another --output") from None
            folder = cls(path)
            folder._begin(identity, restart)
            # A process has one writer for a folder, which may have failed in an earlier run of this process.
            folder.writer.failure = None
            try:
                yield folder
            finally:
                folder.writer.flush(_FLUSH_S)
        finally:
            os.close(lock)

    @property
    def reader(self) -> RecordsReader | None:
        """A reader of the records; ``None`` if there is none."""
        try:
            return RecordsReader(self.path)
        except NoRecordsError:
            return None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the records."""
        return iter(()) if (reader := self.reader) is None else reader.rows()

    def forget_unfinished(self, *, failed: bool) -> None:
        """Remove the records of the rows that the budget left out, and those of failed rows, if asked."""
        outcomes = {Outcome.FAILED} if failed else set()
        self.forget({row["uid"] for row in self.rows() if row["outcome"] in outcomes or row.get("over_budget")})

    def forget(self, names: Collection[str]) -> None:
        """Remove the records of rows, so that these are scored again."""
        for path in self.path.glob("*.jsonl") if names else ():
            kept = path.with_suffix(".tmp")
            with path.open("rb") as lines, kept.open("wb") as file:
                file.writelines(line for line in lines if (parse_line(line) or {}).get("uid") not in names)
            # A whole file takes the place of the old one: a process that is killed here loses no records.
            kept.replace(path)

    def check_written(self) -> None:
        """Raise the error of the first record that could not be written, if any."""
        if self.writer.failure is not None:
            raise self.writer.failure

    def flush(self) -> None:
        """Wait until all records are written.

        Raises:
            OSError: one could not be written.
        """
        if not self.writer.flush(_FLUSH_S):
            raise OSError(f"the records were not written to {self.path} within {_FLUSH_S:g} s")
        self.check_written()

    def _begin(self, identity: Mapping[str, Any], restart: bool) -> None:
        """Check that the folder is empty or of this run, and write the run's identity into `RUN`."""
        file = self.path / RUN
        if any(self.path.iterdir()) and not file.exists():
            raise ConfigError(f"{self.path} was not written by this command: choose another --output")
        # Digests, not the values, which may be secrets.
        run = {name: _digest(value) for name, value in identity.items()}
        before = json.loads(file.read_text()) if file.exists() else run
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        # If all rows have failed, nothing is lost: the function was corrected, and starts over without --restart.
        if changed and not restart and any(row["outcome"] != Outcome.FAILED for row in self.rows()):
            raise ConfigError(
                f"{self.path} has the records of a run with another {' and another '.join(changed)}: choose another "
                "--output, or discard them with --restart"
            )
        if restart or changed:
            for path in self.path.glob("*.jsonl"):
                path.unlink()
            for name in SUB_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
        written = file.with_suffix(".tmp")
        written.write_text(json.dumps(run, indent=1))
        written.replace(file)


def _digest(value: Any) -> str:
    text = json.dumps(json.loads(to_json(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_export(source: Inputs, file: Path) -> None:
    """Check that the file can be written. Called before the first row is scored.

    Raises:
        ConfigError: it is not named ``.jsonl``, its folder cannot be created, or it is an input.
    """
    if file.suffix.lower() != ".jsonl" or file.is_dir():
        raise ConfigError(f"--export {file}: the export is a JSONL file: name it .jsonl")
    if any(file.resolve().is_relative_to(path.resolve()) for path in source.paths):
        raise ConfigError(f"--export {file}: it would overwrite the input, or is in the folder that is scored")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--export {file}: its folder cannot be created: {error.strerror}") from error


def export(source: Inputs, folder: ScoredFolder, file: Path) -> None:
    """Write all rows of the inputs, in order, with their scores; the file is replaced when all are written."""
    results = _results(folder)
    temporary = file.with_name(f".partial-{file.name}")
    with temporary.open("wb") as lines:
        for row in source.rows():
            kept = {f"input_{name}" if name in COLUMNS else name: value for name, value in row.columns.items()}
            lines.write(to_json({**kept, **results[row.name]}) + b"\n")
    temporary.replace(file)


def _results(folder: ScoredFolder) -> dict[str, dict[str, Any]]:
    """Return the added columns of each row, by its name."""
    found: dict[str, dict[str, Any]] = {}
    if (reader := folder.reader) is None:
        return found
    for row in reader.rows():
        text = reader.text(row) or {}
        components = {**(row.get("components") or {}), **(text.get("components") or {})}
        found[row["uid"]] = dict(zip(COLUMNS, (row["reward"], row["outcome"], row["error"], components), strict=True))
    return found
