"""A cache of scores. Equal calls in flight are merged into one, also those of other processes of the job; with a file,
scores are also kept across runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import date
from datetime import time as time_of_day
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import orjson

from reward_loop.errors import ConfigError
from reward_loop.records import current, waiting_for
from reward_loop.scoring.load import source_hash
from reward_loop.scoring.options import CacheConfig
from reward_loop.scoring.signature import Target
from reward_loop.scoring.threads import DaemonThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")

Scored = tuple[float, dict[str, Any]]
"""A score and its extra info."""

MAX_SHARED_BYTES = 2**20
"""The largest size in bytes of a result that other processes get."""

BUSY_TIMEOUT_S = 60.0
"""Seconds to wait while another process writes to the file."""

_FORMAT = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


class Cache:
    """A cache of scores. The key is made of the version, the function's name and source file, and the arguments.

    Not cached: failed samples, unscored samples, and calls with arguments other than JSON values, tuples, numpy values,
    dates, times, UUIDs, enumerations and dataclasses of them.

    Args:
        config: the file and the version.
        target: the function.

    Raises:
        ConfigError: the file has no version, or cannot be opened; or one of the function's bound arguments is not a
            JSON value.
    """

    def __init__(self, config: CacheConfig, target: Target) -> None:
        if config.path is not None and not config.version:
            raise ConfigError(
                "reward_loop.cache.path needs reward_loop.cache.version: any text, which you change when the "
                "function's imports, its captured values or its judge change"
            )
        identity, is_known = _identity(config, target)
        self._basis = orjson.dumps([config.version, *identity])
        self._is_known = bool(config.version) or is_known
        self._in_flight: dict[bytes, _Shared] = {}
        self._store = None if config.path is None else _Store(Path(config.path))
        # Off the event loop: SQLite waits up to `BUSY_TIMEOUT_S` for another process.
        self._thread = DaemonThreads(1)

    def key(self, arguments: Mapping[str, Any]) -> bytes | None:
        """Return the cache key of a call, or ``None`` if its arguments have no key, see `_encoded`."""
        # Without the address: its port changes with each run, and the score does not depend on it.
        named = {name: _stands_for(value) for name, value in arguments.items() if name != "reward_router_address"}
        try:
            text = _encoded(named)
        except TypeError:
            return None
        return hashlib.sha256(self._basis + text).digest()

    def key_in_job(self, key: bytes) -> str | None:
        """Return the key by which other processes of the job know equal calls; ``None`` if it does not identify them.

        Without a version, a key does not identify a function with state that only this process has.
        """
        return key.hex() if self._is_known else None

    async def once(self, key: bytes, call: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Run the call, or wait for an equal call in flight; return its result, and whether this was an earlier call.

        A call is in flight until its score is written to the file. It is cancelled when all its waiters are cancelled.
        """
        shared = self._in_flight.get(key)
        # A task of another event loop cannot be awaited here.
        is_earlier = shared is not None and shared.task.get_loop() is asyncio.get_running_loop()
        if shared is None or not is_earlier:
            shared = self._in_flight[key] = _Shared(asyncio.ensure_future(call()))
            shared.task.add_done_callback(lambda task: self._forget(key, shared))
        shared.waiting += 1
        try:
            with waiting_for(current() if is_earlier else None, "an equal call"):
                # Shielded: a waiter that is cancelled must not end the call of the others.
                return await asyncio.shield(shared.task), is_earlier
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.task.done():
                self._forget(key, shared)
                shared.task.cancel()

    def _forget(self, key: bytes, shared: _Shared) -> None:
        if self._in_flight.get(key) is shared:  # not a newer call with the same key
            del self._in_flight[key]

    async def get(self, key: bytes) -> Scored | None:
        """Return the stored score and extra info of an equal call, or ``None``.

        Raises:
            ConfigError: the file cannot be read.
        """
        text = None if self._store is None else await self._thread.run(functools.partial(self._store.read, key))
        return decode(text or b"")  # a corrupt row is replaced by the next `put`

    async def put(self, key: bytes, score: float, extra_info: Mapping[str, Any]) -> str | None:
        """Store a score in the file, and return it for other processes, see `decode`.

        Nothing is stored or returned if the score and its extra info do not survive a JSON round trip unchanged.
        """
        value = [score, dict(extra_info)]
        try:
            text = orjson.dumps(value)
        except TypeError:
            return None
        if orjson.loads(text) != value:
            return None
        if self._store is not None:
            await self._thread.run(functools.partial(self._store.write, key, text))
        return text.decode() if len(text) <= MAX_SHARED_BYTES else None


def decode(text: str | bytes) -> Scored | None:
    """Return the score and extra info that `Cache.put` made a text of; ``None`` for another text."""
    try:
        score, extra_info = orjson.loads(text)
    except ValueError:
        return None
    return score, extra_info


class _Shared:
    """A call in flight, and the number of samples that wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self.task = task
        self.waiting = 0


class _Store:
    """A table in a SQLite file. Threads and other processes may use the file at the same time.

    A failed write, such as on a full disk, is logged once; the score is not stored, and scoring continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without an isolation level, each statement is committed at once, for the other processes.
            self._database = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            self._use_wal()
            # With WAL, a power failure loses the latest scores at most, and a commit does not wait for the disk.
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"reward_loop.cache.path={path}: {error}") from error

    def _use_wal(self) -> None:
        # SQLite ignores its busy timeout when two processes switch to WAL mode at the same time, so retry here.
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                # The low byte is the primary code, also of codes such as SQLITE_BUSY_RECOVERY.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def read(self, key: bytes) -> bytes | None:
        try:
            with self._lock:
                row = self._database.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"reward_loop.cache.path={self._path}: {error}") from error
        return None if row is None else row[0]

    def write(self, key: bytes, text: bytes) -> None:
        try:
            with self._lock:
                self._database.execute("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, text))
        except sqlite3.Error as error:
            if not self._failed:
                logger.warning("scores are not stored: reward_loop.cache.path=%s: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False


def _identity(config: CacheConfig, target: Target) -> tuple[list[Any], bool]:
    """Return what identifies the function in the file: its name, its bound arguments, and the hash of its file.

    Also return whether that alone identifies it: the function has no other state.

    Raises:
        ConfigError: scores are stored, and a bound argument is not a JSON value.
    """
    function: Any = target.origin
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        bound = {**{str(i): value for i, value in enumerate(function.args)}, **function.keywords, **bound}
        function = function.func
    source = source_hash(function)
    is_plain = inspect.isfunction(function) or inspect.isclass(function)
    is_known = is_plain and "<locals>" not in function.__qualname__ and source is not None
    try:
        arguments = _encoded(bound).decode()
    except TypeError as error:
        if config.path is not None:
            raise ConfigError(
                f"reward_loop.cache.path: the scores of {target.name} cannot be stored, because one of its bound "
                f"arguments is not a JSON value ({error}): bind a JSON value, or remove reward_loop.cache.path"
            ) from error
        arguments, is_known = "", False
    return [target.name, arguments, source], is_known


def _encoded(values: Mapping[str, Any]) -> bytes:
    """Return a text that unequal arguments do not share: their JSON, or if that is not exact, the JSON of `_marked`.

    Raises:
        TypeError: a part of a value has no such text, such as NaN or an object of a class of the user.
    """
    if (text := _json(values)) is not None:
        return text
    try:
        # Each by itself: Python takes a hundred times as long for a list of token ids as orjson.
        parts = [[name, *_exact(values[name])] for name in sorted(values)]
    except RecursionError as error:
        raise TypeError("it is nested too deeply") from error
    except AttributeError as error:  # a dataclass may lack the value of a field
        raise TypeError(str(error)) from error
    return orjson.dumps(parts)


def _exact(value: Any) -> tuple[str, str]:
    if (text := _json(value)) is not None:
        return "JSON", text.decode()
    return "marked", orjson.dumps(_marked(value)).decode()


def _json(value: Any) -> bytes | None:
    """Return the JSON of a value; ``None`` if another value has the same.

    So have tuples, enumerations, UUIDs and NaN: orjson writes them as lists, their values, texts and null.
    """
    with contextlib.suppress(TypeError):
        text = orjson.dumps(value, option=_FORMAT)
        if orjson.loads(text) == value:
            return text
    return None


def _marked(value: Any) -> Any:
    """Return a JSON value in which all but texts and numbers are lists that begin with the name of their type."""
    # Objects of their subclasses are equal to them.
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{value} is not a JSON value")
        return float(value)
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *map(_marked, value)]
    if isinstance(value, dict):
        items = [[_marked(key), _marked(item)] for key, item in value.items()]
        return ["dict", *sorted(items, key=lambda item: orjson.dumps(item[0]))]
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, date | time_of_day | UUID):
        return [name, str(value)]
    if isinstance(value, Enum):
        return [name, _marked(value.value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [name, *(_marked(getattr(value, field.name)) for field in dataclasses.fields(value))]
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        is_object = value.dtype.kind == "O"
        content = _marked(value.tolist()) if is_object else hashlib.sha256(value.tobytes()).hexdigest()
        return [name, str(value.dtype), list(value.shape), content]
    raise TypeError(f"{name} is not a JSON value")


def _stands_for(value: Any) -> Any:
    """Return ``name_or_path`` for an object that has one, such as a tokenizer; otherwise the value itself."""
    name = getattr(value, "name_or_path", None)
    return name if isinstance(name, str) else value
