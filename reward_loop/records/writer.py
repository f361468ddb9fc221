"""A record of every sample, as JSONL."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_loop._util.json import encode
from reward_loop.records.active import ActiveSample
from reward_loop.types import RewardResult

__all__ = ["Records", "record", "records"]

logger = logging.getLogger(__name__)

CLOSING_S = 10.0
"""Seconds that the exit of the process waits for records that are not written yet."""

GATHERING_S = 0.05
"""Seconds in which records are gathered before they are written: a thread that is woken for each of them takes the
interpreter's lock from the event loop each time."""


class Records:
    """The file of the records of one process, ``DIRECTORY/HOST-PID.jsonl``.

    A thread, started with the first record, encodes and writes them. If the disk is full or the directory cannot be
    written to, that is logged once and the records are dropped; scoring continues.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory).absolute() / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._waiting: deque[Mapping[str, Any] | threading.Event] = deque()
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._failed = False
        self._started = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record for writing; it must not be changed afterwards."""
        self._waiting.append(record)
        if not self._started:
            self._start()
        if not self._news.is_set():
            self._news.set()

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all records so far are in the file; return whether they were within ``timeout`` seconds."""
        if not self._started:
            return True
        written = threading.Event()
        self._waiting.append(written)
        self._hurry.set()
        self._news.set()
        return written.wait(timeout)

    def _start(self) -> None:
        with _lock:
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._run, name="reward-records", daemon=True).start()
        atexit.register(self.flush)

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._hurry.wait(GATHERING_S)
            self._hurry.clear()
            self._news.clear()
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            lines = [_line(item) for item in items if not isinstance(item, threading.Event)]
            if lines:
                self._append(b"".join(lines))
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _append(self, data: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                start = file.tell()
                try:
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(start)  # no torn line, which would spoil the file for its readers
                    raise
        except OSError as error:
            if not self._failed:
                logger.warning("records of samples are lost: cannot write %s: %s", self.path, error)
            self._failed = True
        else:
            self._failed = False


_writers: dict[tuple[str, int], Records] = {}
_lock = threading.Lock()


def records(directory: str | Path) -> Records:
    """Return the writer of this process for a directory."""
    key = (os.path.abspath(directory), os.getpid())
    with _lock:
        if key not in _writers:
            _writers[key] = Records(directory)
        return _writers[key]


def record(active: ActiveSample, result: RewardResult) -> dict[str, Any]:
    """Return the record of a sample. All times are in seconds; ``time`` is that of its end, since 1970.

    ``batch_s`` is the wait for the other samples of its call, ``queue_s`` that for a thread or process, ``wait_s`` that
    for limits and between attempts, ``work_s`` the time of the function itself. Each is measured.
    """
    return {
        "time": time.time(),
        "uid": active.sample.uid,
        "data_source": active.sample.data_source,
        "function": active.function,
        "batch": None if active.batch is None else active.batch.id,
        "outcome": str(result.outcome),
        "score": result.score,
        "error": result.error,
        "components": result.extra_info,
        "batch_s": active.batch_s,
        "queue_s": result.queue_seconds,
        "wait_s": result.wait_seconds,
        "work_s": result.seconds,
        "attempts": result.attempts,
        "prompt_tokens": active.prompt_tokens,
        "completion_tokens": active.completion_tokens,
        "judges": active.transcripts,
    }


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return encode(record) + b"\n"
    except Exception as error:  # a value whose str() raises, or one that holds itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        return encode({**kept, "record_error": f"{type(error).__name__}: {error}"}) + b"\n"
