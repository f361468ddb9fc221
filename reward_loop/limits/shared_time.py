"""The seconds that a call in a thread loses because other threads run Python code at the same time."""

from __future__ import annotations

import threading
import time

__all__ = ["MAX_SHARED_S", "SharedTime"]

MAX_SHARED_S = 60.0
"""The largest number of seconds that are added to the deadline of a call."""

_BUSY = 0.1
"""The share of the time for which the process must compute, so that its threads can be short of it. Low, since other
processes may use the cores."""

_OWN_S = 0.002
"""The seconds for which a thread must compute between two measurements, so that it does not merely wait."""


class SharedTime:
    """Measures how long a thread was ready to compute while others held Python's global lock. Create it in the thread.

    With 64 threads that compute, each call takes 64 times as long as alone: its deadline would end it, though it does
    not hang. Time counts as lost only if the thread has computed in it, so a call that waits for a server gets no more
    time.
    """

    __slots__ = ("_all_s", "_at", "_clock", "_own_s", "lost_s", "own_s", "threads")

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._at, self._own_s, self._all_s = time.monotonic(), time.thread_time(), time.process_time()
        self.lost_s = self.own_s = 0.0
        """The seconds that were lost, and those for which the thread computed, until the latest `measure`."""
        self.threads = 0
        """The number of threads of the process, when time was lost last."""

    def measure(self, waited_s: float = 0.0) -> float:
        """Return the seconds that the thread has lost, at most `MAX_SHARED_S`. Called in any thread.

        Args:
            waited_s: the seconds since the latest call of this method for which the thread has waited for limits.
        """
        now, all_s = time.monotonic(), time.process_time()
        try:
            own_s = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return self.lost_s
        window, own, everything = now - self._at - waited_s, own_s - self._own_s, all_s - self._all_s
        self._at, self._own_s, self._all_s = now, own_s, all_s
        self.own_s += own
        threads = threading.active_count()
        if everything >= _BUSY * window and own >= _OWN_S:
            self.lost_s, self.threads = min(MAX_SHARED_S, self.lost_s + max(0.0, window - own)), threads
        return self.lost_s

    def __str__(self) -> str:
        """Return the end of a message about a deadline; empty if much less time was lost than the thread computed."""
        if self.lost_s < self.own_s:
            return ""
        return (
            f": it computed for {self.own_s:.2g} s, and shared the interpreter with {self.threads - 1} other threads "
            "for the rest. Decorate it with @reward_loop.isolated, or set isolation=process: processes use all cores"
        )
