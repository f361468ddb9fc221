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
        self._logged: dict[float | LoopPulse, float] = {}
        """When samples with a ``watchdog_s``, and each blocked event loop, were logged last."""
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
        seconds = {pulse: pulse.blocked_s() for pulse in list(watched_loops.values())} if samples else {}
        blocked = {pulse: found for pulse, found in seconds.items() if found > BLOCKED_S}
        for sample in samples:
            bound = sample.watchdog_s
            if bound is not None and now - sample.started > bound and not _only_waits(sample):
                slow.setdefault(bound, []).append(sample)
        # What is over is forgotten: the next slow sample is logged at once.
        self._logged = {what: at for what, at in self._logged.items() if what in slow or what in blocked}
        for bound, samples in slow.items():
            if self._is_due(bound, now, bound):
                lines = "\n".join(f"  {_line(sample)}" for sample in samples[:_LOGGED])
                logger.warning(
                    "%d samples have been running for more than %g s; the oldest:\n%s", len(samples), bound, lines
                )
        for pulse, found in blocked.items():
            if self._is_due(pulse, now, _REPEAT_S):
                logger.warning(
                    "the event loop has been blocked for %.0f s by %s: all samples of this process wait, and no "
                    "deadline holds. Await what takes long (`await asyncio.to_thread(...)` for sync calls), or make "
                    "the function a plain `def`",
                    *(found, pulse.line()),
                )

    def _is_due(self, what: float | LoopPulse, now: float, every_s: float) -> bool:
        is_due = now - self._logged.get(what, -every_s) >= every_s
        if is_due:
            self._logged[what] = now
        return is_due


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
