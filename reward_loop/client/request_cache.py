"""A file with the answers to earlier requests of a judge, by the address and the body of the request.

Only answers that the client could read are stored, without their token usage: an answer from the file costs nothing,
needs no permit of a limit, and books no tokens. A file that cannot be read or written costs a warning, never a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from reward_loop._util.json import decode, encode
from reward_loop.errors import ConfigError

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S = 60.0
"""Seconds to wait while another process writes to the file."""

_SECRET = b""
"""The key of the row with `RequestCache.secret`."""


class RequestCache:
    """Stores answers in a SQLite file, which several processes may use at the same time.

    Attributes:
        secret: random bytes of the file, to make the marks of fences: in each run, equal texts have equal marks.
    """

    def __init__(self, path: str | Path) -> None:
        """Create the file, or open it.

        Raises:
            ConfigError: the file cannot be created, or is not a cache.
        """
        self._path = Path(path).absolute()  # the function may change the working directory
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            self._run("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB) WITHOUT ROWID")
            self._run("INSERT OR IGNORE INTO answers VALUES (?, ?)", _SECRET, secrets.token_bytes(32))
            self.secret: bytes = self._run("SELECT answer FROM answers WHERE key = ?", _SECRET)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cache={str(path)!r} cannot be used: {error}") from error

    async def get(self, url: str, body: Mapping[str, Any]) -> Any:
        """Return the stored answer to a request, decoded from JSON, or ``None``."""
        stored = await self._safely("SELECT answer FROM answers WHERE key = ?", _key(url, body))
        return None if stored is None else decode(stored)

    async def put(self, url: str, body: Mapping[str, Any], answer: Any) -> None:
        """Store the answer to a request."""
        kept = {name: value for name, value in answer.items() if name != "usage"}
        await self._safely("INSERT OR REPLACE INTO answers VALUES (?, ?)", _key(url, body), encode(kept))

    async def _safely(self, statement: str, *values: bytes) -> Any:
        try:
            # In a thread, since it may wait for the disk or for another process.
            return await asyncio.to_thread(self._run, statement, *values)
        except sqlite3.Error as error:
            logger.warning("cache=%r cannot be used: %s", str(self._path), error)
            return None

    def _run(self, statement: str, *values: bytes) -> Any:
        # A connection of its own for each statement: it would survive neither a fork nor the way to another thread.
        with contextlib.closing(sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)) as database, database:
            row = database.execute(statement, values).fetchone()
        return None if row is None else row[0]


def _key(url: str, body: Mapping[str, Any]) -> bytes:
    return blake2b(url.encode() + b"\0" + encode(body), digest_size=32).digest()
