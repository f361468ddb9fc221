"""The watchdog thread: logs slow samples and blocked event loops, and answers ``reward-loop stuck`` and ``limits``.

A process has at most one watchdog. It listens on an abstract Unix socket named after the user and the process id. It
answers only processes of the same user or of root. As a thread, it also answers while an event loop is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reward_loop._util.event_loops import LoopPulse
from reward_loop._util.framing import frame, receive_frame
from reward_loop.errors import ConfigError
from reward_loop.records.active import OUTAGE, ActiveSample, active_samples

logger = logging.getLogger(__name__)

_LISTED = 20
_LOGGED = 3
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the client process
_TALK_S = 5.0
"""Timeout in seconds for reading a client's question, and for sending the answer."""
_MAX_QUESTION = 1 << 20
"""Maximum length of a question in bytes."""
BLOCKED_S = 10.0
"""The seconds for which an event loop may run no callback before that is logged."""
_BLOCKED_NOW_S = 1.0
"""The same, for an answer to `ask`."""
_REPEAT_S = 60.0
"""The seconds between two messages about the same blocked loop."""


def watch() -> None:
    """Start the watchdog of this process if it does not run yet. Managers call this on each new event loop.

    If it is called on an event loop, the watchdog also watches that loop. It logs a loop that runs no callback for
    `BLOCKED_S` seconds while samples are active, with the line of code that blocks it.

    The watchdog logs how many samples have been running for longer than their ``watchdog_s`` seconds, and the oldest of
    them. It repeats the message every ``watchdog_s`` seconds. Samples with different values of ``watchdog_s`` get
    separate messages. The watchdog answers `ask` even if ``watchdog_s`` is ``None``.
    """
    global _watchdog
    if _watchdog is None:
        with _lock:
            if _watchdog is None:
                _watchdog = _Watchdog()
    # Not `get_running_loop`, which raises in a thread without a loop: managers are created there, too.
    loop = asyncio._get_running_loop()
    if loop is not None and loop not in watched_loops:
        watched_loops[loop] = LoopPulse(loop)


def report() -> dict[str, Any]:
    """Return the state of this process: oldest active samples, blocked event loops, and the stacks of its threads."""
    samples = active_samples()
    pulses = [(pulse, pulse.blocked_s(_BLOCKED_NOW_S)) for pulse in list(watched_loops.values())]
    return {
        "pid": os.getpid(),
        # Not sys.argv: Ray sets process titles that describe its workers.
        "command": Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200],
        "running": len(samples),
        "oldest": [sample.describe() for sample in samples[:_LISTED]],
        "blocked": [{"seconds": round(seconds, 3), "line": pulse.line()} for pulse, seconds in pulses if seconds],
        "threads": dict(_stacks()),
    }


def processes() -> list[int]:
    """Return the process ids of this user's processes on this machine that have a watchdog."""
    prefix = f"@{_name('')}"
    found = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    pids = (name.removeprefix(prefix) for name in found if name.startswith(prefix))
    return sorted(int(pid) for pid in pids if pid.isdecimal())  # any program may use such a name


answers: dict[str, Callable[..., Any]] = {"report": report}
"""The function that answers each question. It is called in the watchdog's thread."""


def ask(pid: int, timeout: float = 5.0, question: str = "report", *arguments: Any) -> Any:
    """Send a question, one of the keys of `answers`, to the watchdog of another process, and return its answer.

    Args:
        pid: id of the process.
        timeout: seconds to wait for each step of the exchange.
        question: the question.
        arguments: its arguments, which must be JSON values.

    Raises:
        OSError: the process does not exist, has no watchdog, or does not answer. A process does not answer while
            native code holds Python's global lock, for example.
        ConfigError: the process rejects the question.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(f"\0{_name(pid)}")
        connection.sendall(frame(json.dumps([question, *arguments]).encode()))
        try:
            answer, refusal = json.loads(receive_frame(connection))
        except EOFError:
            raise ConnectionError("it closed the connection without an answer") from None
    if refusal is not None:
        raise ConfigError(refusal)
    return answer


def why(error: Exception) -> str:
    """Return the reason why `ask` failed, for a message."""
    if isinstance(error, TimeoutError):
        return "it does not answer: some code may be keeping Python's global lock"
    if isinstance(error, ConnectionRefusedError):
        return "no process of this user with this ID scores samples"
    return str(error)


def _name(pid: int | str) -> str:
    # A name in Linux's abstract socket namespace: a killed process leaves no file behind.
    return f"reward-loop/{os.getuid()}/{pid}"


class _Watchdog:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self._logged: dict[float, float] = {}
        self._blocked: dict[LoopPulse, float] = {}
        """Blocked event loops -> when each was logged last."""
        # The socket is created here, before the thread starts, so that the process accepts questions at once.
        listener = self._listen()
        try:
            threading.Thread(target=self._run, args=(listener,), name="reward-watchdog", daemon=True).start()
        except RuntimeError as error:  # no further thread: that must not cost a sample
            logger.warning("samples that run for long are not logged: %s", error)
            if listener is not None:
                listener.close()

    def _run(self, listener: socket.socket | None) -> None:
        while True:
            try:
                if listener is None:
                    time.sleep(1)
                else:
                    self._answer(listener)
                self._look()
            except Exception:
                logger.exception("the watchdog failed")
                time.sleep(1)  # Avoids a busy loop if the error repeats, such as "too many open files" in accept.

    def _listen(self) -> socket.socket | None:
        listener = None
        try:
            listener = socket.socket(socket.AF_UNIX)
            listener.settimeout(1)
            listener.bind(f"\0{_name(self.pid)}")
            listener.listen()
        except OSError as error:
            if listener is not None:
                listener.close()
            logger.warning("`reward-loop stuck` cannot ask this process: %s", error)
            return None
        return listener

    def _answer(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with connection:
            # There is one thread: a client that sends nothing must not stop the watchdog.
            connection.settimeout(_TALK_S)
            # An abstract socket has no permissions, and answers name samples and the user's code.
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid not in (os.getuid(), 0):
                return
            try:
                question, *arguments = json.loads(receive_frame(connection, _MAX_QUESTION))
            except (OSError, EOFError, ValueError):
                return  # the client sent no valid question
            answer, refusal = None, None
            if question in answers:
                try:
                    answer = answers[question](*arguments)
                except ConfigError as error:
                    refusal = str(error)
            else:
                refusal = f"unknown question {question!r}: the process may run another version of reward_loop"
            with contextlib.suppress(OSError):  # the client has closed the connection
                connection.sendall(frame(json.dumps([answer, refusal]).encode("utf-8", "backslashreplace")))

    def _look(self) -> None:
        now = time.perf_counter()
        slow: dict[float, list[ActiveSample]] = {}
        samples = active_samples()
        self._look_at_loops(now, bool(samples))
        for sample in samples:
            bound = sample.watchdog_s
            if bound is not None and now - sample.started > bound and not _waits_for_outage(sample):
                slow.setdefault(bound, []).append(sample)
        # A bound without slow samples is forgotten: the next slow sample is logged at once.
        self._logged = {bound: at for bound, at in self._logged.items() if bound in slow}
        for bound, samples in slow.items():
            if now - self._logged.get(bound, -bound) < bound:
                continue
            self._logged[bound] = now
            queued = sum(map(_waits_for_limits_only, samples))
            note = (
                f", {queued} of them only for a permit of a limit, normal if more run than it allows" if queued else ""
            )
            samples.sort(key=_waits_for_limits_only)  # the others first
            logger.warning(
                "%d samples have been running for more than %g s%s; the oldest:\n%s",
                len(samples),
                bound,
                note,
                "\n".join(f"  {_line(sample.describe())}" for sample in samples[:_LOGGED]),
            )

    def _look_at_loops(self, now: float, active: bool) -> None:
        seconds = {pulse: pulse.blocked_s() for pulse in list(watched_loops.values())} if active else {}
        self._blocked = {pulse: at for pulse, at in self._blocked.items() if seconds.get(pulse, 0) > BLOCKED_S}
        for pulse, blocked in seconds.items():
            if blocked > BLOCKED_S and now - self._blocked.get(pulse, -_REPEAT_S) >= _REPEAT_S:
                self._blocked[pulse] = now
                logger.warning(
                    "the event loop has been blocked for %.0f s by %s: all samples of this process wait, and no "
                    "deadline holds. Await what takes long (`await asyncio.to_thread(...)` for sync calls), or make "
                    "the function a plain `def`",
                    *(blocked, pulse.line()),
                )


def _waits_for_limits_only(sample: ActiveSample) -> bool:
    waits = sample.waits()
    return bool(waits) and all("limit '" in what for what in waits)


def _waits_for_outage(sample: ActiveSample) -> bool:
    """Return whether the sample waits for the end of an outage, which has its own lines in the log."""
    return any(what.startswith(OUTAGE) for what in sample.waits())


def _line(call: dict[str, Any]) -> str:
    source = f" (data source {call['data_source']!r})" if call["data_source"] else ""
    asks = f", waits for {', '.join(call['asking'])}" if call["asking"] else ""
    return f"{call['seconds']:.0f} s: sample {call['uid'] or 'without uid'}{source} in {call['function']}{asks}"


def _stacks() -> Iterator[tuple[str, list[str]]]:
    """Yield the innermost stack lines of threads that run user code: the main thread, those of event loops and those
    of sync functions."""
    frames = sys._current_frames()
    of_loops = {pulse.thread for pulse in list(watched_loops.values())}  # a copy: other threads add loops
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        is_shown = thread is threading.main_thread() or thread.ident in of_loops
        if frame is None or not (is_shown or thread.name.startswith("reward-function")):
            continue
        lines = [f"{part.filename}:{part.lineno} {part.name}" for part in traceback.extract_stack(frame)[-6:]]
        yield f"{thread.name} ({thread.ident})", lines


_watchdog: _Watchdog | None = None
_lock = threading.Lock()
watched_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopPulse] = weakref.WeakKeyDictionary()
"""The event loops that score samples. Empty in a forked child, which has no watchdog yet."""


def _forget() -> None:
    """Reset the watchdog in a forked child, which inherits the variable but not the thread."""
    global _watchdog, _lock
    # A new lock: another thread of the parent may have held the old one during the fork.
    _watchdog, _lock = None, threading.Lock()
    watched_loops.clear()


os.register_at_fork(after_in_child=_forget)
