"""The index of a records folder: DuckDB tables that follow the growing files of rows.

Invariants:

- Only complete lines are read. `files` has the offset of the first line that has not been read.
- The rows of chunks and the new offsets are committed in one transaction: after a crash, no line is missing or twice.
- One thread at a time writes (`_lock`); queries use cursors of their own and see the last commit.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from reward_loop._util.json import encode
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.index import tables
from reward_loop.index.filters import SampleFilter
from reward_loop.records import SAMPLE, RecordsReader, check_version, parse_line

CHUNK = 4 * 2**20
"""The size of a chunk in bytes. To find a row later, its chunk is read again."""

CHUNKS = 32
"""The largest number of chunks that are loaded together, in one statement and transaction: DuckDB's threads share the
work, and write complete row groups."""

CURSORS = 4
"""The largest number of queries that run at the same time: each takes a part of DuckDB's memory."""

RECENT_S = 30.0
"""Seconds after the last new row for which a folder counts as growing."""


_HEAD = 256


class Lines(NamedTuple):
    """Complete lines of a file."""

    path: Path
    start: int
    """The offset of the first line in the file."""
    bytes: int


class Chunk(NamedTuple):
    """Lines of files that are read together, from a copy."""

    number: int
    path: Path
    """The copy; its name without the suffix is the number."""
    parts: Sequence[Lines]
    """Where the lines are in the folder."""


def new_lines(path: Path, start: int, at_most: int) -> bytes:
    """Return the complete lines from an offset on; nothing if there are none, or the file does not exist.

    Args:
        path: the file.
        start: the offset of the beginning of a line.
        at_most: the largest number of bytes; if the first line is longer, that line.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(at_most)
            if b"\n" not in content:
                content += file.readline()
    except FileNotFoundError:
        return b""
    return content[: content.rfind(b"\n") + 1]


def fingerprint(path: Path) -> bytes:
    """Return the beginning of the first line, by which a file is recognised; empty without a complete line."""
    try:
        with path.open("rb") as file:
            line = file.readline(_HEAD)
    except FileNotFoundError:
        return b""
    # An incomplete line may still grow, and would not be the same afterwards.
    return line if line.endswith(b"\n") or len(line) == _HEAD else b""


_ALL = SampleFilter()


class IndexFailedError(RewardLoopError):
    """The index cannot be written."""


class Index:
    """An index of the rows in a records folder.

    The index is open within ``with``.

    Args:
        folder: the records folder.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: a newer version of the library has written the records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revision = 0
        """A number that grows whenever the index changes: the bytes that have been read."""
        self._known: dict[str, int] = {}
        """For each file that has been read: the offset of the first line that has not."""
        self._lock = threading.Lock()
        self._cursors = threading.BoundedSemaphore(CURSORS)
        self._together = CHUNKS
        """The number of chunks that are loaded together; 1 if the memory does not suffice for more."""

    def __enter__(self) -> Index:
        RecordsReader(self.folder)  # checks that the folder contains records
        with contextlib.ExitStack() as stack:
            self._path = stack.enter_context(index_file(self.folder))
            self._database = open_database(self._path, self.folder)
            stack.callback(self._database.close)
            self._known = dict(self._database.execute("SELECT name, bytes FROM files").fetchall())
            self.revision = sum(self._known.values())
            self._numbers = itertools.count(tables.next_chunk(self._database))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Return a cursor for queries of one thread; wait while `CURSORS` threads use one."""
        with self._cursors, self._database.cursor() as cursor:
            yield use(cursor)

    def rows(self, query: str, parameters: Any = None) -> list[dict[str, Any]]:
        """Return the rows of a query, by the names of its columns."""
        with self.cursor() as cursor:
            return rows_of(cursor, query, parameters)

    @contextlib.contextmanager
    def beside(self, other: Index) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
        """Return a cursor that also reads another index, and the name of its samples there. The other one is closed."""
        other._database.close()  # DuckDB opens a file once in a process
        with self.cursor() as cursor:
            cursor.execute(f"ATTACH {_quoted(other._path)} AS beside (READ_ONLY)")
            try:
                yield cursor, "beside.samples"
            finally:
                cursor.execute("DETACH beside")

    @contextlib.contextmanager
    def writing(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Return a cursor within a transaction. No other thread changes the index during the transaction.

        Raises:
            IndexFailedError: DuckDB reports an error, such as a full disk.
        """
        with self._lock, self.cursor() as cursor:
            try:
                cursor.begin()
                yield cursor
                cursor.commit()
            except BaseException as error:
                with contextlib.suppress(duckdb.Error):
                    cursor.rollback()
                if isinstance(error, duckdb.Error):
                    raise IndexFailedError(
                        f"the index of {self.folder} in {self._path.parent} cannot be written: {error}. "
                        "XDG_CACHE_HOME chooses another directory"
                    ) from error
                raise

    def line(self, chunk: int, **fields: Any) -> dict[str, Any] | None:
        """Return the row of a sample as it is in its file.

        Args:
            chunk: the chunk that contains it.
            fields: fields of the row that identify it. The first one is searched for in the text of the chunk.

        Returns:
            ``None`` if the file has been deleted or changed.
        """
        needle = encode(next(iter(fields.values())))
        for content in self._contents(self.rows(_PARTS, [chunk])):
            at = -1
            while (at := content.find(needle, at + 1)) >= 0:
                row = parse_line(content[content.rfind(b"\n", 0, at) + 1 : content.find(b"\n", at) + 1])
                if row is not None and all(row.get(name) == value for name, value in fields.items()):
                    return row
        return None

    def records(self, chosen: SampleFilter = _ALL) -> Iterator[dict[str, Any]]:
        """Yield the whole rows of the samples that count: without those that a resumed run has done again.

        A sample that was trained on has the ``step`` of the training, even if this was not known when it was scored,
        and the field ``advantage``, if the trainer recorded it. Rows whose file was deleted are left out.

        Args:
            chosen: the samples; by default all.
        """
        with self.cursor() as cursor:  # the only one: a thread that waits for a second one could wait for ever
            cursor.execute(_LAST.format(where=chosen.where), chosen.parameters)
            query = f"SELECT DISTINCT chunk FROM samples WHERE {chosen.where} ORDER BY chunk"
            chunks = [row["chunk"] for row in rows_of(cursor, query, chosen.parameters)]
            for chunk in chunks:
                query = _OF_CHUNK.format(where=chosen.where)
                known = {_key(row): row for row in rows_of(cursor, query, [chunk, *chosen.parameters])}
                for content in self._contents(rows_of(cursor, _PARTS, [chunk])):
                    for line in content.splitlines(keepends=True):
                        row = parse_line(line) or {}
                        if row.get("kind") == SAMPLE and (now := known.get(_key(row))) is not None:
                            yield row | {name: now[name] for name in _BOOKED if now[name] is not None}

    def _contents(self, parts: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yield the parts of the files that are a chunk."""
        for part in parts:
            with contextlib.suppress(OSError), (self.folder / part["name"]).open("rb") as file:
                file.seek(part["start"])
                yield file.read(part["bytes"])

    @property
    def is_following(self) -> bool:
        """Whether a file of rows has grown within the last `RECENT_S` seconds."""
        newest = max((path.stat().st_mtime for path in self._row_files()), default=0.0)
        return time.time() - newest < RECENT_S

    @property
    def incomplete(self) -> int:
        """The number of lines that could not be read: those that are not JSON, and incomplete last lines."""
        (found,) = self.rows("SELECT incomplete FROM about")
        return int(found["incomplete"]) + sum(size > 0 for size in self._unread())

    def update(self) -> bool:
        """Read the complete lines that have been added to the files.

        Returns:
            whether there were new lines.

        Raises:
            ConfigError: a newer version of the library has written records.
            OSError: a file cannot be read.
            IndexFailedError: the index cannot be written.
        """
        before = self.revision
        # Lines that are written during this call are read by the next call: otherwise, it might never end.
        end = before + sum(self._unread())
        if end > before:
            with chunk_directory(self._path) as directory, ThreadPoolExecutor(1) as copier:
                chunks = self._copy_chunks(directory, self._known)
                while chunks:
                    known = self._after(self._known, chunks)
                    # The next chunks are copied while these are loaded: loading alone leaves a core idle at times.
                    later = copier.submit(self._copy_chunks, directory, known) if sum(known.values()) < end else None
                    self._load(chunks)
                    chunks = [] if later is None else later.result()
        if self.revision == before:
            return False
        with self.writing() as cursor:
            tables.book(cursor)
        return True

    def _copy_chunks(self, directory: Path, known: Mapping[str, int]) -> list[Chunk]:
        """Copy the next lines of files into chunks of up to `CHUNK` bytes."""
        chunks, read = list[Chunk](), dict(known)
        for _ in range(self._together):
            number, room, parts = next(self._numbers), CHUNK, list[Lines]()
            copy = directory / f"{number}.jsonl"
            with copy.open("wb") as file:
                for path in self._row_files():
                    start = read.get(self._name(path), 0)
                    if room > 0 and (content := new_lines(path, start, room)):
                        file.write(content)
                        parts.append(Lines(path, start, len(content)))
                        read[self._name(path)] = start + len(content)
                        room -= len(content)
            if parts:
                chunks.append(Chunk(number, copy, parts))
            if room > CHUNK // 2:  # there is little more
                break
        return chunks

    def _load(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks to the tables, in one transaction if the memory suffices."""
        try:
            self._load_together(chunks)
        except IndexFailedError as error:
            if len(chunks) == 1 or not isinstance(error.__cause__, duckdb.OutOfMemoryException):
                raise
            self._together = 1  # the rows are very large
            for chunk in chunks:
                self._load_together([chunk])

    def _load_together(self, chunks: Sequence[Chunk]) -> None:
        paths = [chunk.path for chunk in chunks]
        places = [
            (chunk.number, self._name(part.path), part.start, part.bytes) for chunk in chunks for part in chunk.parts
        ]
        fingerprints = {name: fingerprint(self.folder / name) for _, name, _, _ in places}
        with loading(self._database) if len(chunks) > 1 else contextlib.nullcontext(), self.writing() as cursor:
            check_version(tables.load(cursor, paths, places, fingerprints), self.folder)
        for chunk in chunks:
            chunk.path.unlink()
        # After the commit: if that fails, the next call reads these lines again.
        self._known = self._after(self._known, chunks)
        self.revision = sum(self._known.values())

    def _unread(self) -> list[int]:
        """Return how many bytes of each file have not been read."""
        return [max(0, path.stat().st_size - self._known.get(self._name(path), 0)) for path in self._row_files()]

    def _row_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsonl"))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _after(self, known: Mapping[str, int], chunks: Sequence[Chunk]) -> dict[str, int]:
        """Return the offsets of the first lines that have not been read, after some chunks have been."""
        read = {self._name(part.path): part.start + part.bytes for chunk in chunks for part in chunk.parts}
        return {**known, **read}


@contextlib.contextmanager
def open_index(folder: Path) -> Iterator[Index]:
    """Return the index of a records folder, with all complete lines; see `Index`."""
    with Index(folder) as index:
        index.update()
        yield index


def _key(row: Mapping[str, Any]) -> tuple[str, str, float]:
    """Return what identifies a row: other programs may write rows without an ID."""
    return str(row.get("id")), str(row.get("uid")), float(row.get("time") or 0.0)


_BOOKED = ("step", "generated_step", "advantage")
"""The fields of a row that later rows decide."""

_PARTS = "SELECT name, start, bytes FROM chunks WHERE chunk = ?"

_LAST = """
CREATE OR REPLACE TEMP TABLE last AS SELECT samples.rowid AS target, found.advantage
FROM samples JOIN (
    SELECT uid, arg_max(advantage, time) AS advantage FROM advantages
    WHERE uid IN (SELECT uid FROM samples WHERE {where}) GROUP BY uid
) AS found USING (uid)
QUALIFY row_number() OVER (PARTITION BY uid ORDER BY samples.time DESC, id DESC) = 1
"""
_OF_CHUNK = """
SELECT id, uid, time, step, generated_step, last.advantage
FROM (SELECT *, rowid FROM samples) AS samples LEFT JOIN last ON last.target = samples.rowid
WHERE chunk = ? AND ({where})
"""


def rows_of(cursor: duckdb.DuckDBPyConnection, query: str, parameters: Any = None) -> list[dict[str, Any]]:
    """Return the rows of a query, by the names of its columns."""
    cursor.execute(query, parameters)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with duckdb.connect() as connection:
            found = connection.execute("FROM read_parquet(?)", [str(path)])
            names = [column[0] for column in found.description or ()]
            while rows := found.fetchmany(1024):
                yield from (dict(zip(names, row, strict=True)) for row in rows)
    except duckdb.Error as error:
        raise ConfigError(f"{path} cannot be read as parquet: {error}") from error


_THREADS = 2
"""The number of DuckDB's threads. More threads need more memory, and the machine may be training."""

MEMORY = "128MB"
"""The memory that DuckDB uses for data. Larger intermediate results go to disk."""

LOADING_MEMORY = "192MB"
"""The same while many lines are loaded: each thread has a buffer of lines and a row group of its own."""

ROW_GROUP = 20_480
"""The number of rows in a row group. A thread writes row groups of its own, which it keeps in memory until they are
complete: DuckDB's default, 122,880, takes too much."""

KEPT_S = 30 * 24 * 3600.0
"""Seconds for which an unused index is kept."""


_NAME = "records"
"""The name of the database within DuckDB."""


@contextlib.contextmanager
def index_file(folder: Path) -> Iterator[Path]:
    """Return the path for the index of a records folder; within ``with``, no other process uses it.

    The file is in ``reward_loop/index`` of the user's cache directory, so that the next start is fast. If another
    process uses it, or the directory cannot be written, the file is in a temporary directory, deleted at the end.
    """
    with contextlib.ExitStack() as stack:
        try:
            cache = _cache_directory()
            _delete_old(cache)
            path = cache / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]}.duckdb"
            lock = stack.enter_context(path.with_suffix(".lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `_delete_old` reads from it when the index was last used.
            os.utime(lock.fileno())
        except (OSError, RuntimeError):  # RuntimeError: there is no home directory
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reward-loop-index-"))) / "index.duckdb"
        yield path


@contextlib.contextmanager
def chunk_directory(path: Path) -> Iterator[Path]:
    """Return the directory for the chunks that are loaded into an index; within ``with``, it exists."""
    directory = _chunks(path)
    shutil.rmtree(directory, ignore_errors=True)  # of a process that was killed
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def open_database(path: Path, folder: Path) -> duckdb.DuckDBPyConnection:
    """Open the database of an index. An older or damaged one, or one of other records, is deleted and created again."""
    with contextlib.suppress(duckdb.Error):
        if path.exists():  # a connection would make the file, for nothing
            connection = _connect(path)
            try:
                if _fits(use(connection), folder):
                    return connection
            except duckdb.Error:
                pass
            connection.close()
    delete_database(path)
    connection = use(_connect(path))
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as empty:
        tables.create(connection, empty.name)
    return connection


def _fits(database: duckdb.DuckDBPyConnection, folder: Path) -> bool:
    """Return whether the layout is the current one, and the files still begin with the lines that have been read."""
    if database.execute("SELECT layout FROM about").fetchone() != (tables.LAYOUT,):
        return False
    known = database.execute("SELECT name, bytes, fingerprint FROM files").fetchall()
    return all(
        fingerprint(folder / name) == bytes(head) and (folder / name).stat().st_size >= size
        for name, size, head in known
    )


def use(connection: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    """Return a connection, for which the names of tables now mean those of the index."""
    return connection.execute(f"USE {_NAME}")


@contextlib.contextmanager
def loading(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Within ``with``, statements that insert rows use all threads, and more memory; the order of rows is not kept.

    Args:
        connection: a connection that is not within a transaction: after an error, it could not reset the settings.
    """
    connection.execute(f"SET memory_limit = '{LOADING_MEMORY}'")
    try:
        connection.execute("SET preserve_insertion_order = false")
        yield
    finally:
        connection.execute("SET preserve_insertion_order = true")
        with contextlib.suppress(duckdb.OutOfMemoryException):  # other queries use more; the next call sets it
            connection.execute(f"SET memory_limit = '{MEMORY}'")


def delete_database(path: Path) -> None:
    """Delete the database of an index."""
    for file in (path, path.with_name(f"{path.name}.wal")):
        file.unlink(missing_ok=True)
    for directory in (_spill(path), _chunks(path)):
        shutil.rmtree(directory, ignore_errors=True)


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(
        config={
            "threads": _THREADS,
            "memory_limit": MEMORY,
            "temp_directory": str(_spill(path)),
            # By default, DuckDB downloads an extension that a query seems to need.
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    try:
        # Only ATTACH has the option.
        return connection.execute(f"ATTACH {_quoted(path)} AS {_NAME} (ROW_GROUP_SIZE {ROW_GROUP})")
    except duckdb.Error:
        connection.close()
        raise


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _spill(path: Path) -> Path:
    """Return the directory of DuckDB's intermediate results."""
    return path.with_name(f"{path.name}.tmp")


def _chunks(path: Path) -> Path:
    """Return the directory of the chunks that are being loaded."""
    return path.with_name(f"{path.name}.chunks")


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(root) / "reward_loop" / "index"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory


def _delete_old(cache: Path) -> None:
    """Delete the indexes that no viewer has used for `KEPT_S`."""
    for lock in cache.glob("*.lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > KEPT_S:
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The file of the lock stays: a process that has just opened it would lock a deleted file.
                    delete_database(lock.with_suffix(".duckdb"))
