"""Writes the records of one process in a background thread.

A record is encoded where it is made: it cannot change afterwards, its size is known, and the thread only writes bytes.
With an encoder in the thread, which takes turns with the event loop and the threads of functions, the records of a
sample took twice as long (`benchmarks.scoring`). The lines that wait are in one buffer for each file: as separate
objects, they cost 2.7 page faults a sample, which took longer than the encoding.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from reward_loop._util.json import decode, encode_line, to_json
from reward_loop._util.text import cut
from reward_loop.errors import BudgetSpentError
from reward_loop.records.active import ActiveSample
from reward_loop.records.files import (
    ADVANTAGE,
    EXCHANGES,
    OVERLAP,
    PHASE,
    RESUMED,
    ROLLOUT,
    SAMPLE,
    TEXTS,
    VERSION,
    RecordFiles,
    TextPlace,
    WaitsFor,
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
"""The largest size in bytes of the records that wait to be written. A file system that hangs would otherwise fill the
memory; further records are dropped."""

_MAX_DURATIONS = 4096
"""The largest number of durations of exchanges that are kept: the latest ones."""

_CHUNK = 256
"""The largest number of records that are written together."""

TEXT_FIELDS = frozenset({"messages", "request", "response", "reply"})
"""The large fields of an exchange. They are in the files of exchanges, the others in the row of the sample, too."""

MAX_TEXT, MAX_ITEMS = 256, 64
"""The largest numbers of characters and of items of a component in a summary row."""

_SCALARS = (int, float, NoneType)

UNFINISHED = "no answer when the sample ended"


class _Waiting:
    """The lines that wait to be written, in the order of their arrival."""

    def __init__(self) -> None:
        self.rows, self.texts, self.exchanges, self.events = bytearray(), bytearray(), bytearray(), bytearray()
        self.sizes: list[tuple[int, int, int, bool]] = []
        """The size of each row, of its texts and of its exchanges, and whether it says where these are."""
        self.size = 0
        """The size of all lines in bytes."""
        self.written: list[threading.Event] = []
        """Set when the lines are written."""


class Records:
    """The records that one process writes into a folder.

    A thread writes the records; it starts with the first record. If the disk is full, the folder not writable or the
    file system too slow, records are dropped and scoring continues; a warning is logged once until writing succeeds
    again.

    Args:
        directory: the records folder.
        max_bytes: the largest size of the folder in bytes.
    """

    def __init__(self, directory: str | Path, max_bytes: int = MAX_BYTES) -> None:
        self.files = RecordFiles(Path(directory).absolute(), max_bytes)
        self.exchange_counts = ExchangeCounts()
        """The exchanges of the training samples that were recorded here."""
        self._ids = map((self.path.stem + "-{}").format, itertools.count())
        self._waiting = _Waiting()
        self._writing_size = 0
        """The size in bytes of the lines that the thread has taken and not written yet."""
        self._waiting_lock = threading.Lock()
        self._drops = False
        self._has_records = threading.Event()
        self._write_now = threading.Event()
        self._started = False

    @property
    def path(self) -> Path:
        """The file of rows."""
        return self.files.path

    def write(
        self, row: dict[str, Any], text: dict[str, Any] | None = None, exchanges: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Encode a record, and queue it for writing.

        Args:
            row: the summary row, which gets an ID.
            text: the large fields of the sample, which get the ID, too; ``None`` to record none.
            exchanges: its exchanges with model servers; their large fields are written only if there is a `text`.
        """
        row["id"] = name = next(self._ids)
        row["judges"] = ()
        texts = requests = b""
        if text is not None:
            text["id"] = name
            texts = encode_record(text)
        if exchanges:
            row["judges"] = [{key: made[key] for key in made if key not in TEXT_FIELDS} for made in exchanges]
            if not row.get("validate"):
                self.exchange_counts.add(exchanges)
            if text is not None:
                shared = {"version": VERSION, "sample": name, "uid": row.get("uid")}
                requests = b"".join([encode_record({**shared, **exchange}) for exchange in exchanges])
        self._queue(encode_record(row), texts, requests, has_places=True)

    def write_sample(self, active: ActiveSample, result: RewardResult, full: float = 1.0) -> None:
        """Record a sample that has been scored; the result has its reward.

        Samples without a score, and the share ``full`` of the others, get their texts, too.
        """
        is_full = full >= 1 or result.outcome is not Outcome.SCORED or _fraction(active.sample) < full
        large = large_components(result.extra_info) if result.extra_info else {}
        text = text_row(active.sample, large) if is_full else None
        self.write(sample_row(active, result, large), text, exchanges_of(active) if active.exchanges else ())

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue rows that are not samples, so they have no ID, texts or exchanges."""
        for row in rows:
            self._queue(encode_record(row))

    def write_advantages(self, step: int, advantages: Mapping[str, float | None]) -> None:
        """Record the step and the advantages of samples, by their uids: they add to the last earlier row of each.

        ``step`` is the training step whose batch has the samples; they may be generated in an earlier one. An advantage
        is the mean over the tokens of the response that are trained on; ``None`` if there are none.
        """
        self.write_rows([new_row(ADVANTAGE, uid=uid, step=step, advantage=mean) for uid, mean in advantages.items()])

    def write_phase(self, name: str, step: int, start: float, end: float, waits_for: WaitsFor | None = None) -> None:
        """Record a phase of the trainer.

        Args:
            name: the name of verl's timing, such as ``update_actor``.
            step: the training step.
            start: when the phase began, in seconds since 1970.
            end: when it ended.
            waits_for: what the trainer waited for; ``None`` if it computed.
        """
        event = {"version": VERSION, "kind": PHASE, "step": step, "name": name, "start": start, "end": end}
        self._write_event({**event, "waits_for": waits_for})

    def write_rollout(
        self,
        uid: str,
        group: str | None,
        step: int | None,
        *,
        generated_step: int | None = None,
        validate: bool,
        start: float,
        times: Mapping[str, float],
        error: str | None,
    ) -> None:
        """Record a rollout that has ended, rewards included.

        Args:
            uid: the uid of its sample.
            group: the uid of the prompt.
            step: the training step that trains on it; ``None`` if this is not known yet.
            generated_step: the training step in which the prompt was submitted.
            validate: whether it belongs to validation.
            start: when generation began, in seconds since 1970.
            times: when generation ended (``end``), and when the reward was requested (``scoring``) and arrived
                (``scored``), as far as they are known.
            error: why the rollout failed.
        """
        self._write_event(
            {
                "version": VERSION,
                "kind": ROLLOUT,
                "step": step,
                "generated_step": generated_step,
                "validate": validate,
                "uid": uid,
                "group": group,
                "start": start,
                "end": times.get("end") or time.time(),
                "scoring": times.get("scoring"),
                "scored": times.get("scored"),
                "error": None if error is None else cut(error, MAX_TEXT),
            }
        )

    def write_overlap(self, step: int, waiting_s: float, pending_s: float) -> None:
        """Record the seconds of a step that `hidden_share` takes."""
        self._write_event(new_row(OVERLAP, step=step, waiting_s=waiting_s, pending_s=pending_s))

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._queue(encode_record(event), is_event=True)

    def _queue(
        self,
        row: bytes,
        texts: bytes = b"",
        exchanges: bytes = b"",
        *,
        has_places: bool = False,
        is_event: bool = False,
    ) -> None:
        size = len(row) + len(texts) + len(exchanges)
        with self._waiting_lock:
            waiting = self._waiting
            drops = self._writing_size + waiting.size + size > MAX_WAITING
            is_first = not waiting.size
            if not drops:
                waiting.size += size
                if is_event:
                    waiting.events += row
                else:
                    waiting.rows += row
                    waiting.texts += texts
                    waiting.exchanges += exchanges
                    waiting.sizes.append((len(row), len(texts), len(exchanges), has_places))
        # Dropped, not awaited: a full disk must not stop the training.
        if drops:
            if not self._drops:
                logger.warning("records of samples are lost: %s cannot be written fast enough", self.path)
            self._drops = True
            self.files.lost += 1
            self.files.failure = self.files.failure or TimeoutError(f"{self.path} cannot be written fast enough")
            return
        if not self._started:
            self._start()
        if is_first:  # `set` takes a lock: not for each sample
            self._has_records.set()

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all queued records are written; return ``False`` if that takes longer than ``timeout`` seconds."""
        if self._waiting.size:
            self._start()
        if not self._started:
            return not self._waiting.size
        written = threading.Event()
        with self._waiting_lock:
            self._waiting.written.append(written)
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
        self.files.log_lost("records were lost until the end")

    def _run(self) -> None:
        while True:
            self._has_records.wait()
            # Many records are written at once; a `flush` ends the pause.
            self._write_now.wait(GATHERING_S)
            self._write_now.clear()
            # Before the records are taken: one that is queued in the meantime sets it again.
            self._has_records.clear()
            with self._waiting_lock:
                waiting, self._waiting = self._waiting, _Waiting()
                self._writing_size = waiting.size
            try:
                self._write_rows(waiting)
                if waiting.events:
                    self.files.add_events(waiting.events)
            except Exception as error:  # a bug must not end the thread
                logger.exception("records of samples are lost")
                self.files.failure = self.files.failure or OSError(f"{self.path} cannot be written: {error!r}")
            with self._waiting_lock:
                self._writing_size = 0
                self._drops = self._drops and self._waiting.size > 0
            for written in waiting.written:
                written.set()

    def _write_rows(self, waiting: _Waiting) -> None:
        rows, texts, exchanges = memoryview(waiting.rows), memoryview(waiting.texts), memoryview(waiting.exchanges)
        left = iter(waiting.sizes)
        while chunk := [*itertools.islice(left, _CHUNK)]:
            row_sizes, text_sizes, exchange_sizes, has_places = zip(*chunk, strict=True)
            end, text_end, exchange_end = sum(row_sizes), sum(text_sizes), sum(exchange_sizes)
            text_places = _places("text", self.files.add_texts(TEXTS, texts[:text_end]), text_sizes)
            exchange_places = _places(
                "exchange", self.files.add_texts(EXCHANGES, exchanges[:exchange_end]), exchange_sizes
            )
            taken, begin = bytes(rows[:end]), 0
            lines: list[bytes] = []
            for size, text, exchange, has in zip(row_sizes, text_places, exchange_places, has_places, strict=True):
                if has:  # the places are the last fields of the row
                    lines += (taken[begin : begin + size - 2], text, exchange, b"}\n")
                else:
                    lines.append(taken[begin : begin + size])
                begin += size
            self.files.add_rows(b"".join(lines), len(chunk))
            rows, texts, exchanges = rows[end:], texts[text_end:], exchanges[exchange_end:]


def _places(kind: str, first: TextPlace | None, sizes: Sequence[int]) -> Iterator[bytes]:
    """Return the fields of each row that say where its texts are: one after another from the first place on."""
    nowhere = f',"{kind}_file":null,"{kind}_offset":null,"{kind}_bytes":null'.encode()
    if first is None:
        return itertools.repeat(nowhere, len(sizes))
    file, size_is = f',"{kind}_file":"{first.file}","{kind}_offset":'.encode(), f',"{kind}_bytes":'.encode()
    offsets = itertools.accumulate(sizes[:-1], initial=first.offset)
    places = zip(offsets, sizes, strict=True)
    return (b"%b%d%b%d" % (file, offset, size_is, size) if size else nowhere for offset, size in places)


def new_row(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a row of a kind, written now."""
    # The kind first: readers search for it in the first 64 bytes of a line.
    return {"version": VERSION, "kind": kind, "time": time.time(), **fields}


def sample_row(active: ActiveSample, result: RewardResult, large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary row of a sample.

    Args:
        active: the sample, with what it measured.
        result: its result, with the reward.
        large: its `large_components`; their texts are cut, their lists become ``None``.
    """
    # Kind and steps come before what the function returned: readers search only the first bytes of a line for them.
    sample = active.sample
    return {
        "version": VERSION,
        "kind": SAMPLE,
        "time": time.time(),
        "uid": sample.uid,
        "group": sample.group,
        "step": sample.step,
        "generated_step": sample.generated_step,
        "validate": bool(sample.validate),
        "data_source": sample.data_source,
        "function": active.function,
        "batch": None if active.batch is None else active.batch.id,
        "outcome": str(result.outcome),
        "score": result.score,
        "reward": result.reward,
        "masked": result.masked,
        "error": result.error,
        "cause": result.cause,
        "components": {**result.extra_info, **{name: _cut(large[name]) for name in large}}
        if large
        else result.extra_info,
        "response_length": sample.response_length,
        "total_s": result.total_s,
        "batch_s": active.batch_s,
        "queue_s": result.queue_s,
        "wait_s": result.wait_s,
        "work_s": result.work_s,
        "attempts": result.attempts,
        # The times of a single call are those of the row.
        "calls": active.calls if len(active.calls) > 1 else (),
        "prompt_tokens": active.prompt_tokens,
        "completion_tokens": active.completion_tokens,
        "cost": active.cost or None,
        **({"outage_s": result.outage_s} if result.outage_s else {}),
        **({"over_budget": True} if isinstance(result.exception, BudgetSpentError) else {}),
    }


def large_components(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components that are too large for a summary row."""
    large = {}  # not a comprehension, which is a call of its own for each sample
    for name, value in components.items():
        if not isinstance(value, _SCALARS) and _length(value) > (MAX_TEXT if isinstance(value, str) else MAX_ITEMS):
            large[name] = value
    return large


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:  # no length, or a type of the user
        return 0


def _cut(value: Any) -> str | None:
    return cut(value, MAX_TEXT) if isinstance(value, str) else None


def text_row(sample: RewardSample, large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the large fields of a sample, with the `large_components` of its result."""
    return {
        "version": VERSION,
        "uid": sample.uid,
        "prompt": sample.prompt,
        "response": sample.solution_str if sample.response is None else sample.response,
        **({} if sample.response in (None, sample.solution_str) else {"solution_str": sample.solution_str}),
        **({} if sample.turns is None else {"turns": sample.turns}),
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
        "components": large,
    }


def exchanges_of(active: ActiveSample) -> list[dict[str, Any]]:
    """Return copies of the exchanges of a sample: a thread past its deadline may still change the originals."""
    now = time.time()
    # `list` in one step: such a thread may also add an exchange.
    found = [dict(exchange) for exchange in list(active.exchanges.values())]
    for exchange in found:
        if "seconds" not in exchange:
            # The clock may have been set back.
            exchange |= {"seconds": max(0.0, now - exchange.get("time", now)), "error": UNFINISHED}
    return found


def resumed_row(step: int, kept: Collection[str], *, validates: bool = False) -> dict[str, Any]:
    """Return the row with which a trainer begins that continues from a checkpoint: it does later steps again.

    Args:
        step: the last step that is not done again; 0 if all are.
        kept: the groups whose rollouts and rewards are in the checkpoint, so that they are trained on as they are.
        validates: whether it does the validation of ``step`` again.
    """
    return new_row(RESUMED, step=step, kept=sorted(kept), validates=validates)


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


MIN_LENGTH = 8
"""Shorter keys are not hidden: they are words such as ``EMPTY``, which occur in ordinary texts."""

_HIDDEN = b"[API key]"

_LONE_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\(u[dD][89a-fA-F][0-9a-fA-F]{2})")

_WRITTEN = {"\n": "n", "\r": "r", "\t": "t"}
"""How JSON writes the line breaks of a secret, after a backslash."""

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
    """Return a record as a line of JSON, without the keys passed to `hide`.

    Lone surrogates, which many readers reject, become text such as ``\\ud800``. If the record cannot be encoded, only
    its scalar fields are, and the field ``record_error`` says why.
    """
    try:
        line = encode_line(record)  # it rejects them; to search for them would take longer than to encode the record
    except TypeError:
        line = _encode_slowly(record)
    if _secrets:
        for pattern in tuple(_secrets.values()):  # other threads may add keys
            line = pattern.sub(_HIDDEN, line)
    return line


def _encode_slowly(record: Mapping[str, Any]) -> bytes:
    try:
        line = to_json(record)
    except Exception as error:  # a value whose str() raises, or a value that contains itself
        kept = {key: value for key, value in record.items() if isinstance(value, str | int | float | None)}
        line = to_json({**kept, "record_error": f"{type(error).__name__}: {error}"})
    return _LONE_SURROGATE.sub(rb"\1\\\\\2", line) + b"\n"


def cleaned(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as a reader of its line gets it: without API keys and lone surrogates."""
    read: dict[str, Any] = decode(encode_record(record))
    return read
