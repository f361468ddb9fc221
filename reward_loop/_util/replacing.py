"""Writes a file in one step: readers see the whole file, or the earlier one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


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
