"""Writes the records of one process in a background thread."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_loop._util.json import BYTES, decode, encode_fast, to_json
from reward_loop.records.active import ActiveSample
from reward_loop.records.files import EXCHANGES, TEXTS, RecordFiles, TextPlace
from reward_loop.records.rows import (
    TEXT_FIELDS,
    VERSION,
    WaitsFor,
    advantage_row,
    exchanges_of,
    large_components,
    overlap_event,
    phase_event,
    rollout_event,
    sample_row,
    text_row,
)
from reward_loop.types import Outcome, RewardResult, RewardSample

logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**30
"""The default of ``reward_loop.record.max_bytes``."""

CLOSING_S = 10.0
"""Maximum time in seconds that the process waits at exit until all records are written."""

GATHERING_S = 0.05
"""Seconds for which records are collected before they are written. Waking the thread for each record would take
Python's global lock from the event loop each time."""

MAX_WAITING = 256 * 2**20
"""The largest size in characters of the texts that wait to be written. A file system that hangs would otherwise fill
the memory; further records are dropped."""

_MAX_DURATIONS = 4096
"""The largest number of durations of exchanges that are kept: the latest ones."""

_CHUNK = 256
"""The largest number of records that are encoded and written together."""

# Estimates of the characters of a row: only encoding gives the true size, and that is the thread's work.
_ROW_SIZE, _PLAIN_SIZE = 1000, 300

_COUNTED = 16
"""The number of items by which the size of a list is estimated."""


class _Record(NamedTuple):
    row: Mapping[str, Any]
    size: int
    text: Mapping[str, Any] | None = None
    exchanges: Sequence[Mapping[str, Any]] = ()
    has_id: bool = False
    is_event: bool = False


class Records:
    """The records that one process writes into a folder.

    A thread encodes and writes the records; it starts with the first record. If the disk is full, the folder not
    writable or the file system too slow, records are dropped and scoring continues; a warning is logged once until
    writing succeeds again.

    Args:
        directory: the records folder.
        max_bytes: the largest size of the folder in bytes.
    """

    def __init__(self, directory: str | Path, max_bytes: int = MAX_BYTES) -> None:
        self._files = RecordFiles(Path(directory).absolute(), max_bytes)
        self.exchange_counts = ExchangeCounts()
        """The exchanges of the training samples that were recorded here."""
        self._numbers = itertools.count()
        self._waiting: deque[_Record | threading.Event] = deque()
        self._waiting_size = 0
        self._size_lock = threading.Lock()
        self._drops = False
        self._has_records = threading.Event()
        self._write_now = threading.Event()
        self._started = False

    @property
    def path(self) -> Path:
        """The file of rows."""
        return self._files.path

    @property
    def failure(self) -> OSError | None:
        """The first error because of which records were lost, since it was last set to ``None``."""
        return self._files.failure

    @failure.setter
    def failure(self, error: OSError | None) -> None:
        self._files.failure = error

    def write(
        self,
        row: Mapping[str, Any],
        text: Mapping[str, Any] | None = None,
        exchanges: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Queue a record for writing. The caller must not change the arguments afterwards.

        Args:
            row: the summary row.
            text: the large fields of the sample; ``None`` to record none.
            exchanges: its exchanges with model servers; their large fields are written only if there is a `text`.
        """
        if exchanges and not row.get("validate"):
            self.exchange_counts.add(exchanges)
        size = (
            _ROW_SIZE
            + (0 if text is None else _size(text.values()))
            + sum(_ROW_SIZE + _size(exchange.values()) for exchange in exchanges)
        )
        self._queue(_Record(row, size, text, exchanges, has_id=True))

    def write_sample(self, active: ActiveSample, result: RewardResult, full: float = 1.0) -> None:
        """Record a sample that has been scored; the result has its reward.

        Samples without a score, and the share ``full`` of the others, get their texts, too.
        """
        is_full = full >= 1 or result.outcome is not Outcome.SCORED or _fraction(active.sample) < full
        large = large_components(result.extra_info)
        text = text_row(active.sample, large) if is_full else None
        self.write(sample_row(active, result, large), text, exchanges_of(active) if active.exchanges else ())

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue rows that are not samples, so they have no ID, texts or exchanges. The caller must not change them."""
        for row in rows:
            self._queue(_Record(row, _PLAIN_SIZE))

    def write_advantages(self, step: int, advantages: Mapping[str, float | None]) -> None:
        """Record that the batch of a step has these samples, with their advantages by uid; see `advantage_row`."""
        self.write_rows([advantage_row(uid, step, advantage) for uid, advantage in advantages.items()])

    def write_phase(self, name: str, step: int, start: float, end: float, waits_for: WaitsFor | None = None) -> None:
        """Record a phase of the trainer, see `phase_event`."""
        self._write_event(phase_event(name, step, start, end, waits_for))

    def write_rollout(self, uid: str, group: str | None, step: int | None, **fields: Any) -> None:
        """Record a rollout that has ended, see `rollout_event` for its fields."""
        self._write_event(rollout_event(uid, group, step, **fields))

    def write_overlap(self, step: int, waiting_s: float, pending_s: float) -> None:
        """Record the seconds of a step that `hidden_share` takes."""
        self._write_event(overlap_event(step, waiting_s, pending_s))

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._queue(_Record(event, _PLAIN_SIZE, is_event=True))

    def _queue(self, record: _Record) -> None:
        with self._size_lock:
            drops = self._waiting_size + record.size > MAX_WAITING
            if not drops:
                self._waiting_size += record.size
        # Dropped, not awaited: a full disk must not stop the training.
        if drops:
            if not self._drops:
                logger.warning("records of samples are lost: %s cannot be written fast enough", self.path)
            self._drops = True
            self._files.lost += 1
            self.failure = self.failure or TimeoutError(f"{self.path} cannot be written fast enough")
            return
        self._waiting.append(record)
        if not self._started:
            self._start()
        # `is_set` needs no lock, and `set` does: this is called for each sample.
        if not self._has_records.is_set():
            self._has_records.set()

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all queued records are written; return ``False`` if that takes longer than ``timeout`` seconds."""
        if self._waiting:
            self._start()
        if not self._started:
            return not self._waiting
        written = threading.Event()
        # In the queue of the records: it is set once those before it are written.
        self._waiting.append(written)
        self._write_now.set()
        self._has_records.set()
        return written.wait(timeout)

    def _start(self) -> None:
        with _lock:
            if self._started:
                return
            # A daemon: the process must also end if the file system hangs; `_close` waits for at most `CLOSING_S`.
            thread = threading.Thread(target=self._run, name="reward-records", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no further thread now: the next record tries again
                if not self._drops:
                    logger.warning("records of samples wait: %s cannot be written: %s", self.path, error)
                self._drops = True
                return
            self._started = True
        atexit.register(self._close)

    def _close(self) -> None:
        self.flush()
        self._files.log_lost("records were lost until the end")

    def _run(self) -> None:
        while True:
            self._has_records.wait()
            # Many records are written at once; a `flush` ends the pause.
            self._write_now.wait(GATHERING_S)
            self._write_now.clear()
            # Before the records are taken: one that is queued in the meantime sets it again.
            self._has_records.clear()
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            found = [item for item in items if isinstance(item, _Record)]
            for start in range(0, len(found), _CHUNK):
                self._write_chunk(found[start : start + _CHUNK])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _write_chunk(self, found: Sequence[_Record]) -> None:
        try:
            if rows := [record for record in found if not record.is_event]:
                self._write_rows(rows)
            if events := [_line(record.row) for record in found if record.is_event]:
                self._files.add_events(events)
        except Exception as error:  # a bug must not end the thread
            logger.exception("records of samples are lost")
            self.failure = self.failure or OSError(f"{self.path} cannot be written: {error!r}")
        # Also in the thread: `-=` on an attribute is not atomic.
        with self._size_lock:
            self._waiting_size -= sum(record.size for record in found)
            self._drops = self._drops and self._waiting_size > 0

    def _write_rows(self, found: Sequence[_Record]) -> None:
        stem = self.path.stem  # takes as long as the encoding of a row: once for all
        names = [f"{stem}-{next(self._numbers)}" if record.has_id else "" for record in found]
        texts = self._files.add_texts(TEXTS, [*map(_text_line, found, names)])
        exchanges = self._files.add_texts(EXCHANGES, [*map(_exchange_lines, found, names)])
        self._files.add_rows([*map(_row_line, found, names, texts, exchanges)])


def _size(values: Iterable[Any], depth: int = 5) -> int:
    """Return an estimate of the characters in values; long lists are estimated by their first items."""
    size = 0
    for value in values:  # the usual types first, and one call for a whole dict: this runs for each sample
        if isinstance(value, str):
            size += len(value)
        elif value is None or isinstance(value, (int, float)):
            size += 8
        elif isinstance(value, dict) and depth:
            size += _size(value.values(), depth - 1)
        elif isinstance(value, (list, tuple)) and depth:
            first = value[:_COUNTED]
            size += _size(first, depth - 1) * len(value) // max(1, len(first))
        elif isinstance(value, (bytes, bytearray)):
            size += len(value)
        elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            size += _size([value.tolist()], depth) if value.dtype == object else value.nbytes
        else:
            size += 8
    return size


def _fraction(sample: RewardSample) -> float:
    """Return a number from 0 to 1, the same for all samples of a group, and in all processes and runs."""
    name = sample.group or sample.uid or sample.solution_str
    return zlib.crc32(name.encode("utf-8", "backslashreplace")) / 2**32


class ExchangeCounts:
    """The exchanges of one process since the last `take`: their number, missing verdicts and durations.

    The exchanges of a batch call count once for each of its samples. Several threads may add exchanges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._calls = self._without_verdict = 0
        self._seconds: deque[float] = deque(maxlen=_MAX_DURATIONS)

    def add(self, exchanges: Sequence[Mapping[str, Any]]) -> None:
        """Add the exchanges of a sample."""
        with self._lock:
            self._calls += len(exchanges)
            self._without_verdict += sum(bool(exchange.get("unscored")) for exchange in exchanges)
            self._seconds.extend(exchange.get("seconds") or 0.0 for exchange in exchanges)

    def merge(self, taken: Mapping[str, Any]) -> None:
        """Add what `take` has returned in another process."""
        with self._lock:
            self._calls += taken["calls"]
            self._without_verdict += taken["without_verdict"]
            self._seconds.extend(taken["seconds"])

    def take(self) -> dict[str, Any]:
        """Return ``calls``, ``without_verdict`` and ``seconds``, and start again from zero."""
        with self._lock:
            taken = {
                "calls": self._calls,
                "without_verdict": self._without_verdict,
                "seconds": list(self._seconds),
            }
            self._reset()
        return taken


_writers: dict[tuple[str, int], Records] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# Another thread may hold the lock at the fork; its copy would never be released.
os.register_at_fork(after_in_child=_renew_lock)


def records(directory: str | Path, max_bytes: int = MAX_BYTES) -> Records:
    """Return this process's writer for a directory. The first call for a directory decides on `max_bytes`."""
    # By process: a forked child has no writing thread, and needs a file of its own.
    key = (os.path.abspath(directory), os.getpid())
    with _lock:
        if key not in _writers:
            _writers[key] = Records(directory, max_bytes)
        return _writers[key]


def _row_line(record: _Record, name: str, text: TextPlace | None, exchange: TextPlace | None) -> bytes:
    if not record.has_id:
        return _line(record.row)
    judges = [{key: made[key] for key in made if key not in TEXT_FIELDS} for made in record.exchanges]
    text_file, text_offset, text_bytes = text or _NO_PLACE
    exchange_file, exchange_offset, exchange_bytes = exchange or _NO_PLACE
    return _line(
        {
            **record.row,
            "id": name,
            "judges": judges,
            "text_file": text_file,
            "text_offset": text_offset,
            "text_bytes": text_bytes,
            "exchange_file": exchange_file,
            "exchange_offset": exchange_offset,
            "exchange_bytes": exchange_bytes,
        }
    )


_NO_PLACE = (None, None, None)


def _text_line(record: _Record, name: str) -> bytes:
    return b"" if record.text is None else _line({**record.text, "id": name})


def _exchange_lines(record: _Record, name: str) -> bytes:
    if record.text is None or not record.exchanges:
        return b""
    shared = {"version": VERSION, "sample": name, "uid": record.row.get("uid")}
    return b"".join([_line({**shared, **exchange}) for exchange in record.exchanges])


def _line(record: Mapping[str, Any]) -> bytes:
    return encode_record(record) + b"\n"


MIN_LENGTH = 8
"""Shorter keys are not hidden: they are words such as ``EMPTY``, which occur in ordinary texts."""

_HIDDEN = b"[API key]"

_LONE_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\(u[dD][89a-fA-F][0-9a-fA-F]{2})")

_WRITTEN = {"\n": "n", "\r": "r", "\t": "t"}
"""How JSON writes the line breaks of a secret, after a backslash."""

_BYTES = f'{BYTES}":'.encode()
"""In lines with bytes, and with objects of the user that look the same."""

_secrets: dict[str, re.Pattern[bytes]] = {}


def hide(secret: str) -> None:
    """Replace an API key in all records that this process encodes from now on.

    Headers are never recorded. But a server may repeat a key in an error message, and a function in its result.
    """
    secret = secret.strip()  # The environment variable of a key may end in a newline, which is not sent.
    if len(secret) >= MIN_LENGTH and secret not in _secrets:
        # A line may contain an error message that quotes the JSON of an answer: quotes are escaped several times.
        pattern = "".join(char if char.isalnum() else rf"\\*{_WRITTEN.get(char, re.escape(char))}" for char in secret)
        _secrets[secret] = re.compile(pattern.encode())


def encode_record(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON, without the keys passed to `hide`.

    Lone surrogates, which many readers reject, become text such as ``\\ud800``. If the record cannot be encoded, only
    its scalar fields are, and the field ``record_error`` says why.
    """
    try:
        line = _without_lone_surrogates(record)
    except Exception as error:  # a value whose str() raises, or a value that contains itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        line = _without_lone_surrogates({**kept, "record_error": f"{type(error).__name__}: {error}"})
    for pattern in tuple(_secrets.values()):  # other threads may add keys
        line = pattern.sub(_HIDDEN, line)
    return line


def _without_lone_surrogates(record: Mapping[str, Any]) -> bytes:
    try:
        line = encode_fast(record)  # it rejects them; to search for them would take longer than to encode the record
        if _BYTES not in line:
            return line
    except TypeError:
        pass
    return _LONE_SURROGATE.sub(rb"\1\\\\\2", to_json(record, escape=True))


def cleaned(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as a reader of its line gets it: without API keys and lone surrogates."""
    read: dict[str, Any] = decode(encode_record(record))
    return read
