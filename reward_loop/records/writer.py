"""Writes one record per sample to a JSONL file, in a background thread."""

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
"""Maximum time in seconds that the process waits at exit until all records are written."""

GATHERING_S = 0.05
"""Seconds for which records are collected before they are written. Waking the thread for each record would take
Python's global lock from the event loop each time."""


class Records:
    """The file of the records of one process, ``DIRECTORY/HOST-PID.jsonl``.

    A thread encodes and writes the records; it starts with the first record. If the disk is full or the directory not
    writable, the records are dropped and scoring continues; a warning is logged once until writing succeeds again.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory).absolute() / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._waiting: deque[Mapping[str, Any] | threading.Event] = deque()
        self._has_records = threading.Event()
        self._write_now = threading.Event()
        self._failed = False
        self._started = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record for writing. The caller must not change it afterwards."""
        self._waiting.append(record)
        if not self._started:
            self._start()
        if not self._has_records.is_set():
            self._has_records.set()

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all queued records are written; return ``False`` if that takes longer than ``timeout`` seconds."""
        if not self._started:
            return True
        written = threading.Event()
        self._waiting.append(written)
        self._write_now.set()
        self._has_records.set()
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
            self._has_records.wait()
            self._write_now.wait(GATHERING_S)
            self._write_now.clear()
            self._has_records.clear()
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
                        file.truncate(start)  # removes an incomplete line, which readers could not parse
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
    """Return this process's writer for a directory."""
    key = (os.path.abspath(directory), os.getpid())
    with _lock:
        if key not in _writers:
            _writers[key] = Records(directory)
        return _writers[key]


def record(active: ActiveSample, result: RewardResult) -> dict[str, Any]:
    """Return the record of a sample. All times are in seconds.

    - ``time``: when the sample ended, as Unix time.
    - ``batch_s``: wait for the other samples of the batch call.
    - ``queue_s``: wait for a free thread or process.
    - ``wait_s``: wait for limits and between attempts.
    - ``work_s``: run time of the function itself.
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
    except Exception as error:  # a value whose str() raises, or a value that contains itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        return encode({**kept, "record_error": f"{type(error).__name__}: {error}"}) + b"\n"
