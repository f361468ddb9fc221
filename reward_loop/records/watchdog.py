"""The watchdog thread logs slow samples and blocked event loops. A process has at most one.

As a thread, it also runs while an event loop is blocked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref

from reward_loop._util.event_loops import LoopPulse
from reward_loop.records.active import OUTAGE, ActiveSample, active_samples

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_LOGGED = 3
BLOCKED_S = 10.0
"""The seconds for which an event loop may run no callback before that is logged."""
_REPEAT_S = 60.0
"""The seconds between two messages about the same blocked loop."""


def watch() -> None:
    """Start the watchdog of this process if it does not run yet. Managers call this on each new event loop.

    If it is called on an event loop, the watchdog also watches that loop. It logs a loop that runs no callback for
    `BLOCKED_S` seconds while samples are active, with the line of code that blocks it.

    The watchdog logs how many samples have been running for longer than their ``watchdog_s`` seconds, and the oldest of
    them; those that wait for a permit or an outage are left out. It repeats the message every ``watchdog_s`` seconds.
    Samples with different values of ``watchdog_s`` get separate messages.
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


class _Watchdog:
    def __init__(self) -> None:
        self._logged: dict[float, float] = {}
        self._blocked: dict[LoopPulse, float] = {}
        """Blocked event loops -> when each was logged last."""
        try:
            threading.Thread(target=self._run, name="reward-watchdog", daemon=True).start()
        except RuntimeError as error:  # no further thread: that must not cost a sample
            logger.warning("samples that run for long are not logged: %s", error)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            try:
                self._look()
            except Exception:
                logger.exception("the watchdog failed")

    def _look(self) -> None:
        now = time.perf_counter()
        slow: dict[float, list[ActiveSample]] = {}
        samples = active_samples()
        self._look_at_loops(now, bool(samples))
        for sample in samples:
            bound = sample.watchdog_s
            if bound is not None and now - sample.started > bound and not _only_waits(sample):
                slow.setdefault(bound, []).append(sample)
        # A bound without slow samples is forgotten: the next slow sample is logged at once.
        self._logged = {bound: at for bound, at in self._logged.items() if bound in slow}
        for bound, samples in slow.items():
            if now - self._logged.get(bound, -bound) < bound:
                continue
            self._logged[bound] = now
            logger.warning(
                "%d samples have been running for more than %g s; the oldest:\n%s",
                len(samples),
                bound,
                "\n".join(f"  {_line(sample)}" for sample in samples[:_LOGGED]),
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


def _only_waits(sample: ActiveSample) -> bool:
    """Return whether the sample waits for permits, which is usual, or an outage, which has its own lines in the log."""
    waits = sample.waits()
    return bool(waits) and all("limit '" in what or what.startswith(OUTAGE) for what in waits)


def _line(sample: ActiveSample) -> str:
    source = f" (data source {sample.sample.data_source!r})" if sample.sample.data_source else ""
    waits = f", waits for {', '.join(found)}" if (found := sample.waits()) else ""
    return f"{sample.seconds:.0f} s: sample {sample.sample.uid or 'without uid'}{source} in {sample.function}{waits}"


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
