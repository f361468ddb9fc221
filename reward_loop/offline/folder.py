"""The folder of records that one `reward-loop score` writes, and that a later one resumes; the export of its scores."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from reward_loop._util.json import encode, to_json
from reward_loop._util.text import listing
from reward_loop.errors import ConfigError
from reward_loop.offline.inputs import Inputs, import_pyarrow, is_compressed, is_parquet, read_batches
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
"""The columns that are added: the score after the policy, and what the record of the row contains. An input column of
the same name is renamed to ``input_<name>``."""

_Results = Mapping[str, Mapping[str, Any]]


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

    def forget_outcomes(self, outcomes: Collection[Outcome]) -> None:
        """Remove the records of all rows with one of these outcomes, and of those that the budget left out."""
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
        run = dict(_digests(identity))
        before = json.loads(file.read_text()) if file.exists() else run
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        # If all rows have failed, nothing is lost: the function was corrected, and starts over without --restart.
        if changed and not restart and any(row["outcome"] != Outcome.FAILED for row in self.rows()):
            names = sorted({name.partition(".")[0] for name in changed})
            shown = [name for name in changed if not any(other.startswith(f"{name}.") for other in changed)]
            raise ConfigError(
                f"{self.path} has the records of a run with another {' and another '.join(names)}: choose another "
                "--output, or discard them with --restart. Changed since then, by you or by a new version of "
                f"reward-loop: {listing(shown)}"
            )
        if restart or changed:
            for path in self.path.glob("*.jsonl"):
                path.unlink()
            for name in SUB_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
        written = file.with_suffix(".tmp")
        written.write_text(json.dumps(run, indent=1))
        written.replace(file)


def _digests(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each value and group of values with a digest."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        # Not the values, which may be secrets; a digest is too short to find a secret by trying. A change is found
        # although digests are short, since it changes those of its groups, too.
        text = json.dumps(json.loads(encode(value)), sort_keys=True)
        yield name, hashlib.sha256(text.encode()).hexdigest()[:4]
        if isinstance(value, Mapping):
            yield from _digests(value, f"{name}.")


def check_export(source: Inputs, file: Path) -> None:
    """Check that the file can be written. Called before the first row is scored.

    Raises:
        ConfigError: its folder cannot be created, it is an input or no file, or a package is missing.
    """
    if is_parquet(file) or is_compressed(file):
        import_pyarrow(file)
    elif file.suffix.lower() != ".jsonl":
        raise ConfigError(f"--export {file}: the file is JSONL (.jsonl, .jsonl.gz, .jsonl.zst) or parquet (.parquet)")
    if file.exists() and not file.is_file():
        raise ConfigError(f"--export {file}: this is a folder or a device, not a file")
    for path in source.paths:
        if path.is_dir() and file.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"--export {file}: it must not be in the folder that is scored")
        if file.exists() and file.samefile(path):
            raise ConfigError(f"--export {file}: it would overwrite the input")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--export {file}: its folder cannot be created: {error.strerror}") from error


def export(source: Inputs, folder: ScoredFolder, file: Path) -> None:
    """Write all rows of the inputs, in order, with their scores; the file is replaced when all are written.

    In parquet, components are JSON text: their names and types differ between rows, which parquet does not allow.
    """
    results = _results(folder)
    with replacing(file) as temporary:
        if is_parquet(file):
            _write_parquet(source, temporary, results)
        else:
            with _create(temporary) as lines:
                for row in source.rows():
                    lines.write(to_json({**_renamed(row.columns), **results[row.name]}) + b"\n")


def _create(path: Path) -> Any:
    if not is_compressed(path):
        return path.open("wb")
    pa, _ = import_pyarrow(path)
    return pa.output_stream(str(path))


def _results(folder: ScoredFolder) -> dict[str, dict[str, Any]]:
    """Return the added columns of each row, by its name."""
    found: dict[str, dict[str, Any]] = {}
    if (reader := folder.reader) is None:
        return found
    for row in reader.rows():
        text = reader.text(row) or {}
        components = {**(row.get("components") or {}), **(text.get("components") or {})}
        found[row["uid"]] = {
            "score": row["reward"],
            "outcome": row["outcome"],
            "error": row["error"],
            "components": components,
        }
    return found


def _write_parquet(source: Inputs, file: Path, results: _Results) -> None:
    pa, pq = import_pyarrow(file)
    types = dict.fromkeys(COLUMNS, pa.string()) | {"score": pa.float64()}
    rows = source.rows()
    writer = None
    try:
        for columns, count in _tables(source, pa):
            found = [dict(results[row.name]) for row in itertools.islice(rows, count)]
            for result in found:
                result["components"] = to_json(result["components"]).decode()
                result["error"] = _encodable(result["error"])
            arrays = {name: pa.array([result[name] for result in found], type=types[name]) for name in COLUMNS}
            table = pa.table({**_renamed(columns), **arrays})
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
        if writer is None:
            pq.write_table(pa.table({name: pa.array([], type=kind) for name, kind in types.items()}), file)
    finally:
        if writer is not None:
            writer.close()


def _tables(source: Inputs, pa: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the input columns as arrow arrays, with the number of rows: one parquet file in batches, others whole."""
    if source.parquet is not None:
        for batch in read_batches(source.parquet):
            yield dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows
        return
    rows = [row.columns for row in source.rows()]
    names = dict.fromkeys(name for columns in rows for name in columns)
    if rows:
        yield {_encodable(name): _array(pa, [columns.get(name) for columns in rows]) for name in names}, len(rows)


def _array(pa: Any, values: list[Any]) -> Any:
    # In JSON, the type of a field may differ between rows, and an object may be empty. Parquet allows neither: such a
    # column is written as JSON text.
    with contextlib.suppress(pa.ArrowException, OverflowError):
        array = pa.array(_encodable(values))
        mixes = pa.types.is_binary(array.type) and any(isinstance(value, str) for value in values)
        if not mixes and not _has_empty_struct(pa, array.type):
            return array
    return pa.array([None if value is None else to_json(value).decode() for value in values])


def _has_empty_struct(pa: Any, kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_struct(pa, kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_list(kind) and _has_empty_struct(pa, kind.value_type)


def _encodable(value: Any) -> Any:
    """Replace lone surrogates by their escapes: JSON allows them, UTF-8 does not."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def _renamed(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {_free_name(name, columns): value for name, value in columns.items()}


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    if name not in COLUMNS:
        return name
    name = f"input_{name}"
    while name in taken:
        name = f"input_{name}"
    return name


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``file``, which takes its place if the block ends without an error.

    Raises:
        OSError: the file cannot be written. The error names a file.
    """
    temporary = file.with_name(f".partial-{file.name}")
    try:
        yield temporary
        os.replace(temporary, file)
    except OSError as error:
        error.filename = error.filename or str(temporary)
        raise
    finally:
        temporary.unlink(missing_ok=True)
