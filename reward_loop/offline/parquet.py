"""Reads parquet files with pyarrow, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_loop.errors import ConfigError

__all__ = ["import_parquet", "parquet_rows", "read_batches", "rows_of"]


def import_parquet() -> tuple[ModuleType, ModuleType]:
    """Return the modules ``pyarrow`` and ``pyarrow.parquet``; a `ConfigError` says that they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet


def parquet_rows(path: Path) -> int:
    """Return the number of rows of a file. Raises the errors of `read_batches`."""
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


def rows_of(path: Path, batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch. Dates that Python does not have, such as the year 10000, become text.

    Raises:
        ConfigError: such a date is nested in another value.
    """
    pa, _ = import_parquet()
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except (ValueError, OverflowError):
        columns = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                columns.append(column.to_pylist())
            except (ValueError, OverflowError) as error:
                try:
                    columns.append(column.cast(pa.string()).to_pylist())
                except pa.ArrowException:
                    raise ConfigError(f"{path}: the column {name!r} cannot be read: {error}: remove it") from error
        return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read as parquet: {error}"
