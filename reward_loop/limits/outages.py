"""Outages: judges, and services of the run, that cannot be reached now. Calls wait for their end.

A call whose function failed because of an outage has ended: it holds no permit and no thread, and its deadline is over.
So an outage of minutes fails no sample, and does not delay samples with another judge. The call waits for its turn, and
then the function is called again, with a new deadline.

===== ====================================================== ====================================================
State Calls that get their turn                              Next state
===== ====================================================== ====================================================
AWAY  one at a time, with growing pauses: the probe; more,   BACK, when a call got an answer from the address
      if it has not failed for `_CONNECTED_S`
BACK  all, twice as many in each interval                    AWAY, when one of them fails again; closed, when
                                                             no call waits
===== ====================================================== ====================================================

- `Outages` alone keeps the state, for one event loop; `Limits` owns it.
- The bound counts from the first failure, not from the start of a wait: after it, every call fails at once, also new
  ones, until one of them gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque

from reward_loop._util.text import counted
from reward_loop.records import OUTAGE, ActiveBatch, current, waiting_for

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
"""Pauses between two probes."""

_CONNECTED_S = 15.0
"""A probe that has not failed after this time may be connected to a slow judge: further calls get their turn, but the
outage lasts until an answer."""

_RETURN_INTERVAL_S = 0.25

_QUIET_S = 2.0
"""An outage that ends sooner is not logged."""

_LOG_INTERVAL_S = 60.0

FORGET_S = 60.0
"""A failure this long after the last one is a new outage if no call waited in between."""

_NEVER_REACHED = "This address has never answered this process: check the address."


class Outages:
    """The outages of one event loop, by the address of the judge.

    Args:
        timeout_s: how long an outage is survived, in seconds; 0: calls do not wait.
        loop: the event loop.
    """

    def __init__(self, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.timeout_s = timeout_s
        self.loop = loop
        self.open: dict[str, Outage] = {}
        """The outages that have not ended, by their addresses."""
        self.reached: set[str] = set()
        """The addresses that have answered."""

    @property
    def samples(self) -> int:
        """The number of samples whose calls wait, or have their turn."""
        return sum(outage.samples for outage in self.open.values())

    def failed(self, address: str) -> Outage:
        """Return the outage of an address that could not be reached just now."""
        outage = self.open.get(address)
        if outage is None:
            outage = Outage(address, self.timeout_s, was_reached=address in self.reached)
            self.open[address] = outage
        outage.failed()
        return outage

    def answered(self, address: str) -> None:
        """Record an answer from an address. Callable from any thread."""
        if address not in self.reached:
            self.reached.add(address)
        if address in self.open:
            # Not `get_running_loop`, which raises in a thread without a loop.
            if asyncio._get_running_loop() is self.loop:
                self._answered(address)
            elif not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._answered, address)

    def has_answered(self, address: str) -> bool:
        """Return whether an address has answered since the start of this process. Callable from any thread."""
        return address in self.reached

    def _answered(self, address: str) -> None:
        if (outage := self.open.get(address)) is not None:
            outage.answered()
            self._close_if_over(outage)

    def ended(self, outage: Outage) -> None:
        """End the turn of a call, after `failed` or `answered`, or without either if the call was cancelled."""
        outage.ended()
        self._close_if_over(outage)

    def _close_if_over(self, outage: Outage) -> None:
        if outage.is_back and not outage.is_in_use and self.open.get(outage.address) is outage:
            del self.open[outage.address]

    def is_away(self, address: str) -> bool:
        """Return whether calls of an address wait, so that a new call need not ask. Callable from any thread."""
        outage = self.open.get(address)
        return outage is not None and not outage.is_back and outage.is_in_use and outage.left_s > 0


class Outage:
    """The outage of one address; see the module."""

    def __init__(self, address: str, timeout_s: float, *, was_reached: bool) -> None:
        self.address = address
        self.is_back = False
        self.answers = 0
        """The number of answers since the outage began."""
        self.samples = 0
        """The number of samples whose calls wait or have their turn."""
        self._name = address if address.startswith("the limiter service") else f"judge {address}"
        self._timeout_s = timeout_s
        self._was_reached = was_reached
        self._since = self._failed_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._tried = 0
        """The number of calls that have their turn and have not ended."""
        self._failed_since_probe = True
        self._pause = _FIRST_PAUSE_S
        self._batch = 1
        self._timer: asyncio.TimerHandle | None = None
        self._log_timer: asyncio.TimerHandle | None = None
        self._is_logged = self._has_answered = False

    @property
    def seconds(self) -> float:
        """Seconds since the first failure."""
        return time.monotonic() - self._since

    @property
    def left_s(self) -> float:
        """Seconds until waiting calls fail."""
        return self._since + self._timeout_s - time.monotonic()

    @property
    def is_in_use(self) -> bool:
        """Whether calls wait, or have their turn."""
        return bool(self._waiting or self._tried)

    def failed(self) -> None:
        """Record that the address could not be reached."""
        now = time.monotonic()
        is_forgotten = not self.is_in_use and now - self._failed_at > FORGET_S
        # After an answer, this is another outage, with its own bound.
        if is_forgotten or self._has_answered:
            self._since, self._is_logged, self._has_answered = now, False, False
        self._failed_at = now
        self._failed_since_probe = True
        if self.is_back:
            self.is_back = False
            # Instead of the timer that gives all calls their turn.
            self._schedule()

    def answered(self) -> None:
        """Record an answer from the address."""
        self.answers += 1
        self._was_reached = self._has_answered = True
        if not self.is_back:
            self._return()

    async def turn(self) -> bool:
        """Wait for a turn to call the function again; return False if the outage has lasted longer than its bound.

        After each turn, call `Outages.ended`. Cancellation of the wait gives the turn to another call.
        """
        left = self.left_s
        if left <= 0:
            return False
        future = self._loop.create_future()
        self._waiting.append(future)
        self.samples += _samples_of_call()
        self._start_log()
        if self._timer is None:
            self._schedule()
        try:
            with waiting_for(current(), f"{OUTAGE} {self.address}"):
                async with asyncio.timeout(left):
                    await future
        except BaseException as error:
            if future.done() and not future.cancelled():  # the turn came at the same moment
                self.ended()
            else:
                with contextlib.suppress(ValueError):  # `_give_turn` has removed it
                    self._waiting.remove(future)
                self.samples -= _samples_of_call()
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def ended(self) -> None:
        """See `Outages.ended`."""
        self._tried -= 1
        self.samples -= _samples_of_call()
        # Without a failure, others that have their turn may be connected: the end of one at its deadline says nothing.
        if not self.is_back and (self._failed_since_probe or not self._tried):
            self._schedule()

    def given_up(self) -> str:
        """Return what the message of a sample says that has waited as long as allowed."""
        hint = "" if self._was_reached else f" {_NEVER_REACHED}"
        return (
            f"\n{self._name} could not be reached for {self.seconds:.0f} s; calls wait at most "
            f"{self._timeout_s:g} s (reward_loop.outage_timeout_s).{hint}"
        )

    def _schedule(self) -> None:
        """Let the next call try after a pause."""
        self._cancel_timer()
        # Random: all workers of the job lose the judge at the same moment, and should not ask together.
        self._timer = self._loop.call_later(self._pause * random.uniform(0.75, 1), self._probe)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _probe(self) -> None:
        self._timer = None
        self._batch = 1
        self._failed_since_probe = False
        if self._give_turn():
            self._timer = self._loop.call_later(_CONNECTED_S, self._give_turns)

    def _return(self) -> None:
        """Give the waiting calls their turn, now that the address has answered."""
        self.is_back, self._batch, self._pause = True, 1, _FIRST_PAUSE_S
        self._log_return()
        self._cancel_timer()
        self._give_turns()

    def _give_turns(self) -> None:
        """Give waiting calls their turn: one, then two, then four at each interval."""
        self._timer = None
        for _ in range(self._batch):
            self._give_turn()
        # Not all at once: a judge that has just started would be full, and some calls would fail again.
        self._batch *= 2
        if self._waiting:
            self._timer = self._loop.call_later(_RETURN_INTERVAL_S, self._give_turns)

    def _give_turn(self) -> bool:
        """Give the call that has waited longest its turn; return False if none waits."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # else it was cancelled, and its task has not run since
                future.set_result(None)
                self._tried += 1
                return True
        return False

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # The console

    def _start_log(self) -> None:
        if self._log_timer is None:
            # An address that has never answered may be wrong: the user can stop the run at once.
            delay = _QUIET_S - self.seconds if self._was_reached else 0.25
            self._log_timer = self._loop.call_later(_LOG_INTERVAL_S if self._is_logged else delay, self._log)

    def _stop_log(self) -> None:
        if self._log_timer is not None:
            self._log_timer.cancel()
            self._log_timer = None

    def _log(self) -> None:
        self._log_timer = None
        if not self.is_in_use:
            return
        self._log_timer = self._loop.call_later(_LOG_INTERVAL_S, self._log)
        self._is_logged = True
        hint = "" if self._was_reached else f". {_NEVER_REACHED}"
        logger.warning(
            "%s unreachable for %.0f s, %s waiting, for at most %g s (reward_loop.outage_timeout_s)%s",
            *(self._name, self.seconds, counted(self.samples, "sample"), self._timeout_s, hint),
        )

    def _log_return(self) -> None:
        self._stop_log()
        if self._is_logged:
            logger.warning(
                "%s answers again after %.0f s, continuing with %s",
                *(self._name, self.seconds, counted(self.samples, "sample")),
            )
        self._is_logged = False


def _samples_of_call() -> int:
    """Return the number of samples of the current call."""
    call = current()
    return len(call.members) if isinstance(call, ActiveBatch) else 1
