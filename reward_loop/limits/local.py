"""The limits of a job and its failure bound, kept in this process and used on one event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from reward_loop._util.text import first_line
from reward_loop.errors import TooManyFailuresError
from reward_loop.limits.limiter import PERIOD_S, Limiter
from reward_loop.limits.options import JobOptions
from reward_loop.limits.permit import Limits, Order, Permit, limits_of
from reward_loop.types import Outcome, RewardResult

_SAMPLES_OF_A_BUDGET = 64
"""The number of samples after which something should have counted for a budget."""

_SHOWN = 3
"""The maximum number of causes that an error message lists."""

__all__ = ["LocalLimits"]

logger = logging.getLogger(__name__)


class LocalLimits(Limits):
    """Keeps limits, budget and failure bound in this process, on one event loop. Managers that get it share them.

    Args:
        options: the options, such as a `RewardLoopConfig`.
        period: the seconds over which requests and tokens are counted; shorter than a minute only in tests.
    """

    def __init__(self, options: JobOptions, period: float = PERIOD_S) -> None:
        super().__init__(options)
        self.cost = self.tokens = 0.0
        self.stopped: str | None = None
        """Why the run must stop."""
        self.limiters = {name: Limiter(name, config, period) for name, config in limits_of(options).items()}
        self._outcomes = 0
        self._failures: dict[str, FailureBound] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.on_spent: Callable[[str], None] = lambda why: None
        """Called with the reason, once the budget is used up."""

    def request(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> asyncio.Future[Permit]:
        loop = self.check_loop()
        self.check(name)
        limiter = self.limiters[name]
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
                self.on_spent(self.spent)

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

    def count(self, result: RewardResult, of: str = "") -> None:
        self.add_outcome(of, result.outcome is Outcome.FAILED, result.error, result.cause)

    def add_outcome(self, of: str, failed: bool, error: str | None, cause: str | None) -> None:
        """Count one sample for the failure bound, with its error message and cause if it failed."""
        self._outcomes += 1
        if self._outcomes == _SAMPLES_OF_A_BUDGET:
            self._check_budget()
        self.failures_of(of).add(failed, error, cause)

    def _check_budget(self) -> None:
        """Log if nothing has counted for a budget, which would then never end the run."""
        budget = self.options.budget
        for what, used, cap in (("cost", self.cost, budget.max_cost), ("tokens", self.tokens, budget.max_tokens)):
            if cap is not None and not used:
                logger.warning(
                    "reward_loop.budget.max_%s=%g: %d samples have ended, and none has reported %s. reward_loop.client "
                    "reports the tokens that a server counts; report others with lease.used(%s=...)",
                    *(what, cap, self._outcomes, what, what),
                )

    def failures_of(self, component: str = "") -> FailureBound:
        """Return the failure bound of whole samples, or of a component."""
        if component not in self._failures:
            self._failures[component] = FailureBound.of_options(self.options, component)
        return self._failures[component]

    def stop(self, why: str) -> None:
        self.stopped = self.stopped or why

    def snapshot(self) -> dict[str, Any]:
        """Return the limits and their current usage."""
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
