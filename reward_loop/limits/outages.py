"""Outages: judges that cannot be reached now. Calls wait for their end.

A call whose function failed because of an outage has ended: it holds no permit and no thread, and its deadline is over.
So an outage of minutes fails no sample, and does not delay samples with another judge.

- One waiting call at a time asks, after a pause; when it has ended without an answer, another one asks.
- Any answer of the judge, to whichever call, ends the outage: all waiting calls go on.
- The bound counts from the first failure, not from the start of a wait: after it, every call fails at once, also new
  ones, until one of them gets an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from reward_loop._util.retry_after import Backoff
from reward_loop._util.text import counted
from reward_loop.records import OUTAGE, current, waiting_for

logger = logging.getLogger(__name__)

_QUIET_S = 2.0
"""An outage that ends sooner is not logged."""

_LOG_INTERVAL_S = 60.0

FORGET_S = 60.0
"""A failure this long after the last one is a new outage if no call waited in between."""


class JudgeAddress(NamedTuple):
    """What cannot be reached."""

    address: str
    """``scheme://host:port``, as its client writes it; empty if the error of a client does not have it."""
    model: str = ""
    """The model that was asked, if it is known."""
    function: str = ""
    """The function whose own client raised an error without an address."""

    def __str__(self) -> str:
        name = f"judge {self.address}" if self.address else f"the judge of {self.function}"
        return f"{name} (model {self.model})" if self.model else name


class Outages:
    """The outages of a process, by the judge.

    Args:
        timeout_s: how long an outage is survived, in seconds; 0: calls do not wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.open: dict[JudgeAddress, Outage] = {}
        """The outages that have not ended."""
        self.answered_at: dict[JudgeAddress, float] = {}
        """When each judge answered last, by `time.monotonic`."""

    def failed(self, judge: JudgeAddress, hint: str = "") -> Outage:
        """Return the outage of a judge that could not be reached just now; ``hint`` is added to its messages."""
        now, outage = time.monotonic(), self.open.get(judge)
        if outage is None or (not outage.calls and now - outage.failed_at > FORGET_S):
            outage = self.open[judge] = Outage(judge, self.timeout_s, hint)
        outage.failed_at = now
        return outage

    def answered(self, judge: JudgeAddress) -> None:
        """Record an answer of a judge. Callable from any thread."""
        self.answered_at[judge] = time.monotonic()
        if (outage := self.open.pop(judge, None)) is not None and not outage.loop.is_closed():
            outage.loop.call_soon_threadsafe(outage.end)

    def is_away(self, judge: JudgeAddress) -> bool:
        """Return whether calls wait for a judge, so that a new call need not ask. Callable from any thread."""
        outage = self.open.get(judge)
        return outage is not None and outage.calls > 0 and outage.left_s > 0


class Outage:
    """The outage of one judge; see the module."""

    def __init__(self, judge: JudgeAddress, timeout_s: float, hint: str = "") -> None:
        self.judge = judge
        self.loop = asyncio.get_running_loop()
        self.since = self.failed_at = time.monotonic()
        """The first and the last failure."""
        self.calls = 0
        """The number of calls that wait or ask."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timeout_s = timeout_s
        self._hint = hint
        self._backoff = Backoff()
        self._is_asked = False
        """Whether a call asks, or will do so after its pause."""
        self._has_ended = False
        self._logged_at = -math.inf

    @property
    def left_s(self) -> float:
        """Seconds until waiting calls fail."""
        return self.since + self._timeout_s - time.monotonic()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """Wait until this call may ask, which it does within the block; False if the outage has lasted too long."""
        turn = self.loop.create_future()
        self._waiting.append(turn)
        self.calls += 1
        self._give_next()
        try:
            with contextlib.suppress(TimeoutError), waiting_for(current(), f"{OUTAGE} {self.judge}"):
                async with asyncio.timeout(max(0.0, self.left_s)):
                    await turn
            yield not turn.cancelled()
        finally:
            self.calls -= 1
            # A cancelled one stays in the queue until it would have its turn. Otherwise it had the turn, also if it was
            # cancelled at that moment.
            if not turn.cancelled() and not self._has_ended:
                self._is_asked = False
                self._give_next()

    def end(self) -> None:
        """Let all calls go on, since the judge has answered."""
        self._has_ended = True
        if self._logged_at > 0:
            seconds = time.monotonic() - self.since
            logger.warning("%s answers again after %.0f s, continuing %s", self.judge, seconds, self._calls())
        while self._waiting:
            if not (turn := self._waiting.popleft()).done():
                turn.set_result(None)

    def given_up(self) -> str:
        """Return what the message of a sample says that has waited as long as allowed."""
        return (
            f"\n{self.judge} could not be reached for {time.monotonic() - self.since:.0f} s; calls wait at most "
            f"{self._timeout_s:g} s (reward_loop.outage_timeout_s).{self._hint}"
        )

    def _give_next(self) -> None:
        if not self._is_asked and self._waiting:
            self._is_asked = True
            self.loop.call_later(self._backoff.next_s(), self._give)

    def _give(self) -> None:
        self._log()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_asked = False

    def _log(self) -> None:
        now = time.monotonic()
        # An address that has never answered may be wrong: the user can stop the run at once.
        if now - self.since > (0 if self._hint else _QUIET_S) and now - self._logged_at > _LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(
                "%s unreachable for %.0f s, %s waiting, for at most %g s (reward_loop.outage_timeout_s).%s",
                *(self.judge, now - self.since, self._calls(), self._timeout_s, self._hint),
            )

    def _calls(self) -> str:
        return counted(self.calls, "call")
