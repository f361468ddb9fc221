"""The folder of records that one `reward-loop score` writes, and that a later one resumes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import encode
from reward_loop.errors import ConfigError
from reward_loop.records.configuration import config_row, configurations, open_configuration
from reward_loop.records.files import SUB_FOLDERS
from reward_loop.records.reader import NoRecordsError, RecordsReader, parse_line
from reward_loop.records.writer import records
from reward_loop.types import Outcome

__all__ = ["MAX_BYTES", "ScoredFolder"]

_FLUSH_S = 600.0
"""Seconds within which all records must be on the disk at the end."""

MAX_BYTES = 2**62
"""The largest size of the folder: nothing is deleted."""


class ScoredFolder:
    """A folder of records with one record for each row that has been scored. A row's name is the record's ``uid``.

    Invariants:

    - Only one process writes the folder: it locks it.
    - All records are of one run: the last row of the sub-folder ``config`` identifies its input, function and options.
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
        lock = os.open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another run is writing {path}: wait for it, or choose another --output") from None
            folder = cls(path)
            folder._begin(config_row({"score": identity}, step=0), restart)
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

    def forget(self, names: Collection[str]) -> None:
        """Remove the records of rows, so that these are scored again."""
        for path in self.path.glob("*.jsonl") if names else ():
            kept = path.with_suffix(".tmp")
            with path.open("rb") as lines, kept.open("wb") as file:
                file.writelines(line for line in lines if (parse_line(line) or {}).get("uid") not in names)
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

    def _begin(self, run: Mapping[str, Any], restart: bool) -> None:
        """Check that the folder is empty or of this run, whose configuration is ``run``, and record that."""
        found = configurations(self.path)
        if any(self.path.iterdir()) and not (found and any(name.startswith("score.") for name in found[-1]["options"])):
            raise ConfigError(f"{self.path} was not written by this command: choose another --output")
        options = json.loads(encode(run["options"]))  # as they are read: for example, lists instead of tuples
        before = found[-1]["options"] if found else options
        changed = [name for name in {**before, **options} if before.get(name) != options.get(name)]
        if changed and not restart and any(row["outcome"] != Outcome.FAILED for row in self.rows()):
            names = sorted({name.split(".")[1] for name in changed})
            raise ConfigError(
                f"{self.path} has the records of a run with another {' and another '.join(names)}: choose another "
                "--output, or discard them with --restart"
            )
        if restart or changed:
            for path in self.path.glob("*.jsonl"):
                path.unlink()
            for name in SUB_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
        if restart or changed or not found:
            configuration = open_configuration(self.path)
            configuration.write_rows([run])
            configuration.flush()
