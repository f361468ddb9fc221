"""The file in which an index is kept between two starts of the viewer."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb

from reward_loop.view import tables

__all__ = ["chunk_directory", "index_file", "loading", "open_database", "use"]

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

    The file is in ``reward_loop/view`` of the user's cache directory, so that the next start is fast. If another viewer
    uses it, or the directory cannot be written, the file is in a temporary directory, which is deleted at the end.
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
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reward-loop-view-"))) / "index.duckdb"
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


def open_database(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the database of an index; an older or damaged one is deleted and created again."""
    with contextlib.suppress(duckdb.Error):
        connection = _connect(path)
        try:
            row = use(connection).execute("SELECT layout FROM about").fetchone()
        except duckdb.Error:
            row = None
        if row == (tables.LAYOUT,):
            return connection
        connection.close()
    delete_database(path)
    connection = use(_connect(path))
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as empty:
        tables.create(connection, empty.name)
    return connection


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
        quoted = str(path).replace("'", "''")
        return connection.execute(f"ATTACH '{quoted}' AS {_NAME} (ROW_GROUP_SIZE {ROW_GROUP})")
    except duckdb.Error:
        connection.close()
        raise


def _spill(path: Path) -> Path:
    """Return the directory of DuckDB's intermediate results."""
    return path.with_name(f"{path.name}.tmp")


def _chunks(path: Path) -> Path:
    """Return the directory of the chunks that are being loaded."""
    return path.with_name(f"{path.name}.chunks")


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(root) / "reward_loop" / "view"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory


def _delete_old(cache: Path) -> None:
    """Delete the indexes that no viewer has used for `KEPT_S`."""
    for lock in cache.glob("*.lock"):
        with contextlib.suppress(OSError):
            if time.time() - lock.stat().st_mtime > KEPT_S:
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    delete_database(lock.with_suffix(".duckdb"))
