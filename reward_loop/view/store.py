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

__all__ = ["THREADS", "index_file", "open_database"]

THREADS = 2
"""The number of DuckDB's threads. More threads need more memory, and the machine may be training."""

MEMORY = "128MB"
"""The memory that DuckDB uses for data. Larger intermediate results go to disk."""

KEPT_S = 30 * 24 * 3600.0
"""Seconds for which an unused index is kept."""


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
            os.utime(lock.fileno())
        except (OSError, RuntimeError):  # RuntimeError: there is no home directory
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reward-loop-view-"))) / "index.duckdb"
        yield path


def open_database(path: Path) -> duckdb.DuckDBPyConnection:
    """Open the database of an index; an older or damaged one is deleted and created again."""
    with contextlib.suppress(duckdb.Error):
        connection = _connect(path)
        try:
            row = connection.execute("SELECT layout FROM about").fetchone()
        except duckdb.Error:
            row = None
        if row == (tables.LAYOUT,):
            return connection
        connection.close()
    delete_database(path)
    connection = _connect(path)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as empty:
        tables.create(connection, empty.name)
    return connection


def delete_database(path: Path) -> None:
    """Delete the database of an index."""
    for file in (path, path.with_name(f"{path.name}.wal")):
        file.unlink(missing_ok=True)
    shutil.rmtree(_spill(path), ignore_errors=True)


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    return duckdb.connect(
        path,
        config={
            "threads": THREADS,
            "memory_limit": MEMORY,
            "temp_directory": str(_spill(path)),
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )


def _spill(path: Path) -> Path:
    """Return the directory of DuckDB's intermediate results."""
    return path.with_name(f"{path.name}.tmp")


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
