"""Where limits, budget and failures of a job are kept: in one place, by one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

from reward_loop._util.text import did_you_mean, listing
from reward_loop.config import LimitConfig, RewardLoopConfig, parse
from reward_loop.errors import LimitError, TooManyFailuresError
from reward_loop.limits.failures import FailureBound
from reward_loop.limits.limiter import PERIOD_S, Limiter, Ticket
from reward_loop.limits.permit import Place

__all__ = ["JobState"]

logger = logging.getLogger(__name__)


class JobState:
    """Limits, budget and failures of a job: their one owner, used by one event loop. A `Job` for one process.

    Args:
        options: the limits, the budget and the bound on failures.
        period: seconds over which requests and tokens are counted; a minute, but for tests.
    """

    def __init__(self, options: RewardLoopConfig, period: float = PERIOD_S) -> None:
        self._options = options
        self._period = period
        self._limiters = {name: Limiter(name, config, period) for name, config in options.limits.items()}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.name = f"process {os.getpid()}"
        self.limited = frozenset(self._limiters)
        self._failures: dict[str, FailureBound] = {}
        self.cost = 0.0
        self.tokens = 0.0
        self.spent: str | None = None
        self.stopped: str | None = None
        """Why the run must stop, if it must."""

    async def enter(self, name: str, tokens: float, share: str) -> Place:
        """Wait for a place within a limit."""
        place = _Here(self, name, tokens, share)
        self.queue(name, place)
        if place.state == "waiting":
            await place.wait(self._limiters[name].config.max_wait)
        return place

    def queue(self, name: str, ticket: Ticket) -> None:
        """Queue a call; it is admitted when it may begin, perhaps at once.

        Raises:
            LimitError: there is no such limit, or it never lets this call through.
        """
        limiter = self._limiters.get(name)
        if limiter is None:
            raise LimitError(
                f"there is no limit {name!r}{did_you_mean(name, self._limiters) or '.'} Configured in "
                f"reward_loop.limits: {listing(self._limiters) or 'none'}"
            )
        ticket.tokens = ticket.tokens or limiter.config.estimated_tokens_per_request
        limiter.enter(time.monotonic(), ticket)
        if limiter.has_queue:
            self._advance(name)

    def correct(self, name: str, ticket: Ticket, tokens: float) -> None:
        """Correct the tokens of a call."""
        self._limiters[name].used(time.monotonic(), ticket, tokens)
        self._advance(name)

    def leave(self, name: str, ticket: Ticket, refused: bool, retry_after: float | None) -> None:
        """A call has ended, or will not be made."""
        limiter = self._limiters[name]
        limiter.leave(time.monotonic(), ticket, refused=refused, retry_after=retry_after)
        if limiter.has_queue:
            self._advance(name)

    def configure(self, name: str, changes: dict[str, Any]) -> None:
        """Change some options of a limit, or add one, while the job runs.

        Raises:
            ConfigError: an option is wrong.
        """
        limiter = self._limiters.get(name)
        known = limiter.config.model_dump() if limiter else {}
        config = parse(LimitConfig, {**known, **changes}, f"limits.{name}")
        if limiter is None:
            self._limiters[name] = Limiter(name, config, self._period)
            self.limited = frozenset(self._limiters)
        else:
            limiter.configure(config)
            self._advance(name)
        logger.info("limit %r is changed: %s", name, ", ".join(f"{key}={value}" for key, value in changes.items()))

    def spend(self, cost: float, tokens: float) -> None:
        """Count what a call used."""
        self.cost += cost
        self.tokens += tokens
        budget = self._options.budget
        for what, used, cap in (("cost", self.cost, budget.max_cost), ("tokens", self.tokens, budget.max_tokens)):
            if cap is not None and used >= cap and self.spent is None:
                self.spent = f"the run's budget is used up: {used:g} of reward_loop.budget.max_{what}={cap:g}"
                if budget.at_cap == "stop":
                    self.spent += ". Raise it, or let the run go on without calls by reward_loop.budget.at_cap"
                else:
                    logger.warning("%s: no more calls are made (at_cap=%s)", self.spent, budget.at_cap)

    def count(self, failed: bool, error: str | None, of: str = "") -> None:
        """Count one sample, or what ``of`` names in it."""
        try:
            if of not in self._failures:
                self._failures[of] = FailureBound.of_options(self._options, of)
            self._failures[of].add(failed, error)
        except TooManyFailuresError as stop:
            self.stopped = str(stop)
            raise

    @property
    def max_waits(self) -> dict[str, float | None]:
        """The limits there are, and the seconds that a call may wait for them."""
        return {name: limiter.config.max_wait for name, limiter in self._limiters.items()}

    async def why_stopped(self) -> str | None:
        """Say why the run must stop, if it must."""
        return self.stopped

    def status(self) -> dict[str, Any]:
        """What there is in flight, waiting and used."""
        now = time.monotonic()
        limits = {name: limiter.status(now) for name, limiter in self._limiters.items()}
        return {"limits": limits, "cost": self.cost, "tokens": self.tokens, "spent": self.spent}

    def _advance(self, name: str) -> None:
        limiter = self._limiters[name]
        if not limiter.has_queue:
            return
        at = limiter.advance(time.monotonic())
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if at is not None:
            # A little late rather than early: an early look would find no room, and come back at once.
            delay = max(0.0, at - time.monotonic()) + 0.001
            self._timers[name] = asyncio.get_running_loop().call_later(delay, self._advance, name)


class _Here(Ticket):
    """A place of a call in this process."""

    __slots__ = ("_job", "_name", "_turn")

    def __init__(self, job: JobState, name: str, tokens: float, share: str) -> None:
        super().__init__(tokens, share)
        self._job = job
        self._name = name
        self._turn: asyncio.Future[None] | None = None

    def admit(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def refuse(self, error: LimitError) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_exception(error)

    async def wait(self, max_wait: float | None) -> None:
        loop = asyncio.get_running_loop()
        turn = self._turn = loop.create_future()
        # By hand: `asyncio.timeout` costs several times as much, with thousands that wait.
        timer = None if max_wait is None else loop.call_later(max_wait, _give_up, turn, self._name, max_wait)
        try:
            await turn
        except BaseException:
            self.leave()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def used(self, tokens: float) -> None:
        self._job.correct(self._name, self, tokens)

    def leave(self, refused: bool = False, retry_after: float | None = None) -> None:
        self._job.leave(self._name, self, refused, retry_after)


def _give_up(turn: asyncio.Future[None], name: str, max_wait: float) -> None:
    if not turn.done():
        turn.set_exception(LimitError(f"limit {name!r}: no place within max_wait={max_wait:g} s"))
