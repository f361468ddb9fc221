"""pyarrow, which is optional."""

from __future__ import annotations

from types import ModuleType

from reward_loop.errors import ConfigError

__all__ = ["import_parquet"]


def import_parquet() -> tuple[ModuleType, ModuleType]:
    """Return ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("parquet files need pyarrow: pip install 'reward-loop[parquet]'") from error
    return pyarrow, pyarrow.parquet
