"""Places within limits, as the calls of a reward function hold them."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
from typing import Any

from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop._util.transient import is_refusal, retry_after
from reward_loop.errors import LimitError
from reward_loop.limits.permit import DEFAULT, RETRY, Job, Place
from reward_loop.records import current, waiting_for

__all__ = ["CallLimits", "Lease", "amount", "current_lease", "current_limits", "enter"]


class CallLimits:
    """One call of a reward function, as far as the limits inside it are concerned.

    Args:
        job: what all calls share.
        share: ``train`` or ``validate``.
        loop: where places are asked for.
    """

    __slots__ = ("_asking", "_depth", "_since", "_total", "given_up", "job", "leases", "loop", "sample", "share")

    def __init__(self, job: Job, share: str, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.share = share
        self.loop = loop
        self.sample = current()
        self.leases: set[Lease] | None = None  # most calls have none
        self._depth = 0
        self._since = 0.0
        self._total = 0.0
        self._asking: set[asyncio.Task[Any]] | None = None  # likewise
        self.given_up = False

    def waited(self, now: float) -> float:
        """How many seconds, up to `time.monotonic` ``now``, at least one part of the call waited for a limit."""
        return self._total + (now - self._since if self._depth else 0.0)

    def begin_wait(self) -> None:
        """A part of the call waits from now on."""
        if not self._depth:
            self._since = time.monotonic()
        self._depth += 1

    def end_wait(self) -> None:
        """It does not wait any more."""
        self._depth -= 1
        if not self._depth:
            self._total += time.monotonic() - self._since

    def hold(self, lease: Lease) -> None:
        """Keep a lease until it ends."""
        if self.leases is None:
            self.leases = set()
        self.leases.add(lease)

    def release(self) -> None:
        """Give back what a call holds that is given up: it may never come to do so itself."""
        for lease in list(self.leases or ()):
            lease.end(None)

    def give_up(self) -> None:
        """Nobody waits for the call any more. Where it runs on, as threads do, it gets no more places."""
        self.given_up = True
        for task in self._asking or ():
            task.cancel()

    async def enter_for_thread(self, name: str, tokens: float) -> Lease:
        """As `enter`, in a task of its own, for a thread that waits for it."""
        if self._asking is None:
            self._asking = set()
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            return await enter(self, name, tokens)
        except asyncio.CancelledError:
            raise LimitError(_OVER) from None
        finally:
            self._asking.discard(task)


current_limits: contextvars.ContextVar[CallLimits | None] = contextvars.ContextVar("reward_call_limits", default=None)
"""The call of a reward function that the running code is part of."""


class Lease:
    """A place within a limit. Outside of a reward function's call it is one without a limit."""

    def __init__(self, call: CallLimits | None, place: Place | None) -> None:
        self._call = call
        self._place = place
        self._counted = (0.0, 0.0)
        self._refused: tuple[bool, float | None] = (False, None)

    def used(self, tokens: float | None = None, cost: float | None = None) -> None:
        """Say what the call used: it takes the place of the estimate, and counts towards the run's budget.

        Args:
            tokens: all tokens of the call, as the service counts them; a later value replaces an earlier one.
            cost: its costs, in the unit of ``reward_loop.budget.max_cost``; likewise.

        Raises:
            ValueError: one is no amount.
        """
        self._on_loop(self._used, amount("tokens", tokens), amount("cost", cost))

    def add(self, tokens: float) -> None:
        """Say that one more request took so many tokens; `reward_loop.client` does so by itself."""
        self._on_loop(self._add, amount("tokens", tokens))

    def refused(self, retry_after: float | None = None) -> None:
        """Say that the service answered 429, where the function does not raise that.

        Args:
            retry_after: the seconds that the service asked to wait.
        """
        self._refused = (True, amount("retry_after", retry_after))

    def end(self, error: BaseException | None) -> None:
        """Leave the place."""
        call, place = self._call, self._place
        if call is None or not call.leases or self not in call.leases:
            return
        call.leases.discard(self)
        if place is not None:
            refused, seconds = self._refused
            if error is not None and is_refusal(error):
                refused, seconds = True, retry_after(error)
            self._on_loop(place.leave, refused, seconds)

    def _used(self, tokens: float | None, cost: float | None) -> None:
        if self._call is None:
            return
        if tokens is not None and self._place is not None and self in (self._call.leases or ()):
            self._place.used(tokens)
        before = self._counted
        self._counted = (before[0] if tokens is None else tokens, before[1] if cost is None else cost)
        self._call.job.spend(self._counted[1] - before[1], self._counted[0] - before[0])

    def _add(self, tokens: float) -> None:
        self._used(self._counted[0] + tokens, None)

    def _on_loop(self, function: Any, *arguments: Any) -> None:
        if self._call is None:
            return
        loop = self._call.loop
        if loop is asyncio._get_running_loop():
            function(*arguments)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(function, *arguments)


def amount(name: str, value: Any) -> float | None:
    """Return a number of tokens, seconds or costs as a `float`, of whichever library it is; ``None`` stays.

    Raises:
        ValueError: it is no finite number, or below 0.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number, 0 or more; got {shorten(value)}")
    return number


current_lease: contextvars.ContextVar[Lease | None] = contextvars.ContextVar("reward_lease", default=None)
"""The innermost place that the running code holds."""


def _let_go() -> None:
    """In a fork of this process: its places are its own, and the loop that gives others does not run in the fork."""
    current_limits.set(None)
    current_lease.set(None)


os.register_at_fork(after_in_child=_let_go)


_OVER = "the call that asked for a place within a limit is over"


async def enter(call: CallLimits, name: str, tokens: float) -> Lease:
    """Wait for a place within a limit, on the loop of the call.

    Raises:
        LimitError: there is no such limit, this call can never fit it, its turn did not come in time, or nobody waits
            for the call any more.
        JobServiceError: whoever keeps the limits for all workers cannot be reached.
    """
    if call.given_up:
        raise LimitError(_OVER)
    place = None
    if _is_limited(call.job, name):
        call.begin_wait()
        try:
            with waiting_for(call.sample, f"limit {name!r}"):
                place = await call.job.enter(name, tokens, call.share)
        finally:
            call.end_wait()
    lease = Lease(call, place)
    call.hold(lease)
    return lease


def _is_limited(job: Job, name: str) -> bool:
    if name in (DEFAULT, RETRY):
        raise LimitError(f"the limit {name!r} holds for the whole function: inside it, name another one")
    if name in job.limited:
        return True
    others = job.limited - {DEFAULT, RETRY}
    if others:
        raise LimitError(
            f"there is no limit {name!r}{did_you_mean(name, others) or '.'} Configured in "
            f"reward_loop.limits: {listing(others)}"
        )
    return False
