"""The limits of a job and its failure bound, kept in this process and used on one event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from reward_loop._util.text import did_you_mean, first_line, listing
from reward_loop.errors import BudgetSpentError, LimitError, TooManyFailuresError
from reward_loop.limits.limiter import PERIOD_S, Limiter
from reward_loop.limits.options import JobOptions, LimitConfig
from reward_loop.limits.permit import OF_MODEL, Limits, Order, Permit, users_limits
from reward_loop.types import Outcome, RewardResult

_SHOWN = 3
"""The maximum number of causes that an error message lists."""

logger = logging.getLogger(__name__)


class LocalLimits(Limits):
    """Keeps limits and budget in this process. Requests and tokens are counted over ``period`` seconds."""

    def __init__(self, options: JobOptions, period: float = PERIOD_S) -> None:
        super().__init__(options)
        self.cost = self.tokens = 0.0
        # Without `max_wait`: a request waits only while others are in flight, and these have deadlines.
        limits = options.limits | {
            OF_MODEL + name: LimitConfig(max_concurrent=model.max_concurrent, max_wait=None)
            for name, model in options.models.items()
            if model.max_concurrent is not None
        }
        self.max_waits = {name: config.max_wait for name, config in limits.items()}
        self.limiters = {name: Limiter(name, config, period) for name, config in limits.items()}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.name = f"process {os.getpid()}"
        self.on_change: Callable[[str, Any], None] = lambda what, value: None
        """Called with ``spent`` and the reason, once the budget is used up."""

    def request(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> asyncio.Future[Permit]:
        loop = self.check_loop()
        if self.spent is not None:
            raise BudgetSpentError(self.spent)
        limiter = self.limiters.get(name)
        if limiter is None:
            known = users_limits(self.limiters)
            raise LimitError(
                f"unknown limit {name!r}{did_you_mean(name, known) or '.'} Configured in "
                f"reward_loop.limits: {listing(known) or 'none'}"
            )
        permit = Permit(self, name, tokens or limiter.config.estimated_tokens_per_request)
        request: asyncio.Future[Permit] = loop.create_future()
        limiter.enter(time.monotonic(), order, permit, request)
        # No callback for a request that was granted at once: this is the path of most calls.
        if not request.done():
            self._advance(name)  # sets the timer
            request.add_done_callback(functools.partial(self._settled, name))
        return request

    def _settled(self, name: str, request: asyncio.Future[Permit]) -> None:
        if request.cancelled() or request.exception() is not None:
            self._advance(name)  # a request behind it may need less

    def correct(self, permit: Permit, tokens: float) -> None:
        self.limiters[permit.name].used(time.monotonic(), permit, tokens)
        self._advance(permit.name)

    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        self.limiters[permit.name].leave(time.monotonic(), accepted, retry_after)
        self._advance(permit.name)

    def spend(self, cost: float, tokens: float) -> None:
        self.cost += cost
        self.tokens += tokens
        budget = self.options.budget
        for what, used, cap in (("cost", self.cost, budget.max_cost), ("tokens", self.tokens, budget.max_tokens)):
            # Only the first cap that is reached: the message must stay the same for all samples.
            if cap is not None and used >= cap and self.spent is None:
                self.spent = f"the run's budget is used up: {used:g} of reward_loop.budget.max_{what}={cap:g}"
                if budget.at_cap == "stop":
                    self.spent += (
                        ". Raise it, or set reward_loop.budget.at_cap to default or mask to continue without calls"
                    )
                else:
                    logger.warning("%s: no more calls are made (at_cap=%s)", self.spent, budget.at_cap)
                for limiter in self.limiters.values():
                    limiter.refuse_waiting(self.spent)
                # At the change only: many calls that are in flight then still report what they used.
                self.on_change("spent", self.spent)

    def _advance(self, name: str) -> None:
        limiter = self.limiters[name]
        # Without a queue there is nothing to grant, and no timer to set: most calls end here.
        if not limiter.has_queue:
            return
        at = limiter.advance(time.monotonic())
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if at is not None and self.loop is not None:
            # 1 ms later, since too early a call would grant nothing.
            delay = max(0.0, at - time.monotonic()) + 0.001
            self._timers[name] = self.loop.call_later(delay, self._advance, name)

    async def status(self) -> dict[str, Any]:
        return self.snapshot()

    def snapshot(self) -> dict[str, Any]:
        """Return the same as `status`, without awaiting."""
        limits = {
            name: {
                "in_flight": limiter.in_flight,
                "waiting": limiter.waiting,
                "max_in_flight": limiter.concurrency.limit if limiter.concurrency.limit < math.inf else None,
            }
            for name, limiter in self.limiters.items()
        }
        return {"limits": limits, "cost": self.cost, "tokens": self.tokens, "spent": self.spent}


class FailureBound:
    """Counts recent outcomes; `count` raises if the share of failed samples exceeds the bound.

    Args:
        max_share: the allowed share of failed samples, from 0 to 1.
        min_samples: the number of outcomes before the bound applies.
        window: the number of recent outcomes that are counted; at least ``min_samples``.
        of: the name of the counted component, for messages; ``""`` for whole samples.
    """

    def __init__(self, max_share: float, min_samples: int, window: int = 1024, of: str = "") -> None:
        self.of = of
        self.max_share = max_share
        self.min_samples = min_samples
        # A smaller window than `min_samples` would never fill up to it: the bound would never apply.
        self._failed: deque[bool] = deque(maxlen=max(window, min_samples))
        self._causes: dict[str, str] = {}

    @classmethod
    def of_options(cls, options: JobOptions, of: str = "") -> Self:
        """Return the failure bound configured in the options."""
        return cls(options.max_failed_share, options.min_samples_for_failed_share, options.failed_share_window, of)

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: the sample failed, and so did more than ``max_share`` of the recent samples.
        """
        self.add(result.outcome is Outcome.FAILED, result.error, result.cause)

    def add(self, failed: bool, error: str | None, cause: str | None) -> None:
        """Count one sample, with its error message and cause if it failed; raises as `count` does."""
        self._failed.append(failed)
        if not failed:
            return
        error = error or "(no error message)"
        cause = cause or first_line(error)
        # Inserted again, so that the dictionary has the latest causes last.
        self._causes.pop(cause, None)
        self._causes[cause] = error
        if len(self._causes) > _SHOWN:
            del self._causes[next(iter(self._causes))]
        # Counted only after a failure, so a run whose samples succeed does not pay for the sum.
        failures, seen = sum(self._failed), len(self._failed)
        if seen >= self.min_samples and failures > self.max_share * seen:
            of = f"{self.of}: " if self.of else ""
            latest = "\n".join(f"- {error}" for error in reversed(self._causes.values()))
            raise TooManyFailuresError(
                f"{of}{failures} of the last {seen} samples failed, more than the share of {self.max_share:g} "
                f"that max_failed_share allows. The latest failure of each cause:\n{latest}\n"
                "Try the function on a few rows with `reward-loop check`. If this many failures are expected, raise "
                "max_failed_share (in a verl run reward_loop.max_failed_share, with a command -O max_failed_share)."
            )
