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
    """The file that one process writes its records to, ``DIRECTORY/HOST-PID.jsonl``: opened at the first of them.

    They are encoded and written in a thread. A disk that is full, or a directory that cannot be written to, is told
    once, and costs records, but no sample.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory).absolute() / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._waiting: deque[Mapping[str, Any] | threading.Event] = deque()
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._failed = False
        threading.Thread(target=self._run, name="reward-records", daemon=True).start()
        atexit.register(self.flush)

    def write(self, record: Mapping[str, Any]) -> None:
        """Have a record written; it must not be changed afterwards."""
        self._waiting.append(record)
        if not self._news.is_set():
            self._news.set()

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all records so far are in the file; whether they were within ``timeout`` seconds."""
        written = threading.Event()
        self._waiting.append(written)
        self._hurry.set()
        self._news.set()
        return written.wait(timeout)

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
    """The one writer of this process for that directory."""
    key = (os.path.abspath(directory), os.getpid())
    with _lock:
        if key not in _writers:
            _writers[key] = Records(directory)
        return _writers[key]


def record(call: ActiveSample, result: RewardResult) -> dict[str, Any]:
    """What is written about a sample. All times are in seconds; ``time`` is that of its end, since 1970.

    ``queue_s`` is the wait for a thread or process, ``wait_s`` that for limits and between attempts, ``work_s`` the
    time of the function itself.
    """
    return {
        "time": time.time(),
        "uid": call.sample.uid,
        "data_source": call.sample.data_source,
        "function": call.function,
        "outcome": str(result.outcome),
        "score": result.score,
        "error": result.error,
        "components": result.extra_info,
        "queue_s": max(0.0, call.seconds - result.wait_seconds - result.seconds),
        "wait_s": result.wait_seconds,
        "work_s": result.seconds,
        "attempts": result.attempts,
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "judges": call.transcripts,
    }


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return encode(record) + b"\n"
    except Exception as error:  # a value whose str() raises, or one that holds itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        return encode({**kept, "record_error": f"{type(error).__name__}: {error}"}) + b"\n"
