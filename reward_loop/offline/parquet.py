"""Reads parquet files with pyarrow, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_loop.errors import ConfigError

__all__ = ["import_parquet", "parquet_rows", "read_batches"]


def import_parquet() -> tuple[ModuleType, ModuleType]:
    """Return the modules ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a file.

    Raises:
        ConfigError: pyarrow is not installed, or cannot read the file.
    """
    pa, pq = import_parquet()
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(_unreadable(path, error)) from error


def read_batches(path: Path) -> Iterator[Any]:
    """Yield the file's record batches, each of at most 1024 rows.

    Raises:
        ConfigError: pyarrow is not installed, or cannot read the file.
    """
    pa, pq = import_parquet()
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=1024)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read as parquet: {error}"
