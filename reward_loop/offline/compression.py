"""Reads and writes files that are compressed with gzip or Zstandard, an optional dependency."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from reward_loop.errors import ConfigError

__all__ = ["SUFFIXES", "create", "import_zstandard", "open_binary"]

SUFFIXES = (".gz", ".zst")
"""The suffixes of compressed files that are written. Files are read by their content, whatever their suffix is."""

_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""The first bytes of a file."""

_READ_BYTES = 1 << 16


def import_zstandard() -> ModuleType:
    """Return the module ``zstandard``; a `ConfigError` says that it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(".zst files need zstandard: pip install zstandard") from error
    return zstandard


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, within ``with``; the content is decompressed.

    Raises:
        ConfigError: the content is damaged, or zstandard is not installed.
    """
    damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        start = file.peek(len(_ZSTANDARD))
        if start.startswith(_GZIP):
            file = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=file)))
        elif start.startswith(_ZSTANDARD):
            damaged += (import_zstandard().ZstdError,)
            file = stack.enter_context(io.BufferedReader(_ZstandardReader(file)))
        try:
            yield file
        except damaged as error:
            raise ConfigError(f"{path} cannot be decompressed: {error}") from error


@contextlib.contextmanager
def create(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    """Create a file for writing, within ``with``; at the end it is on the disk. ``.gz`` and ``.zst`` are compressed."""
    with path.open("wb") as file:
        if suffix.lower() == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", filename="") as zipped:
                yield cast(IO[bytes], zipped)
        elif suffix.lower() == ".zst":
            with import_zstandard().ZstdCompressor().stream_writer(file, closefd=False) as compressed:
                yield compressed
        else:
            yield file
        file.flush()
        os.fsync(file.fileno())


class _ZstandardReader(io.RawIOBase):
    """Decompresses a file of one or several frames. Unlike the stream of zstandard, it reports a missing end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decompressor = import_zstandard().ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._compressed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            data = self._compressed or self._file.read(_READ_BYTES)
            if not data:
                if not self._frame.eof:
                    raise EOFError("the end is missing")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._plain = self._frame.decompress(data)
            self._compressed = self._frame.unused_data
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count
