"""The limits, the budget and the failure bound of a job: the interface `Limits`, and `LocalLimits` in this process.

A request for a permit is a future: pending while it waits, with the permit as its result, with an exception if it was
refused, cancelled if the caller no longer wants it. So the end of a call ends all its requests, granted or not, also
those of threads that still run (`Call.end`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from reward_loop._util.text import did_you_mean, first_line, listing
from reward_loop._util.transient import is_refusal, retry_after, status_of
from reward_loop.errors import BudgetSpentError, LimitError, TooManyFailuresError
from reward_loop.limits.limiter import PERIOD_S, Limiter, Order
from reward_loop.limits.options import JobOptions, LimitConfig
from reward_loop.limits.outages import Outages
from reward_loop.types import Outcome, RewardResult

__all__ = ["LocalLimits"]

logger = logging.getLogger(__name__)

DEFAULT = "default"
"""The limit for every call of the reward function."""

REWARD_MODEL = "reward_model"
"""The limit for calls of functions that get the address of a reward model that the run serves."""

WHOLE_CALL = frozenset({DEFAULT, REWARD_MODEL})
"""The limits that apply to a whole call of the function; inside the function, they cannot be used."""

OF_MODEL = f"{REWARD_MODEL}/"
"""The beginning of the names of limits for the requests to one model."""

ABANDONED = "no permit was granted, because the call was cancelled or is past its deadline"

_SAMPLES_OF_A_BUDGET = 64
"""The number of samples after which something should have counted for a budget."""

_SHOWN = 3
"""The maximum number of causes that an error message lists."""


def users_limits(names: Iterable[str]) -> set[str]:
    """Return the names of limits that functions use by name."""
    return {name for name in names if name not in WHOLE_CALL and not name.startswith(OF_MODEL)}


class Permit:
    """One call's permit, from its grant to `leave`.

    Args:
        limits: the owner of the permit; ``None`` if no limit applies.
        name: the name of the limit.
        tokens: the estimated tokens of the call.
        id: the number of the permit among those of a worker of a job.
    """

    __slots__ = ("_answer", "has_left", "id", "limits", "name", "reported", "tokens", "unpaid_until")

    def __init__(self, limits: Limits | None, name: str, tokens: float = 0, id: int = 0) -> None:
        self.limits = limits
        self.name = name
        self.tokens = tokens
        self.id = id
        self.has_left = False
        """Whether the permit has ended."""
        self.reported = 0.0
        """The tokens used so far."""
        self.unpaid_until = 0.0
        """The limiter's record of the tokens; see `Rate.add`."""
        # The best response, since `answer` only replaces it by a worse one.
        self._answer: tuple[bool | None, float | None] = (True, None)

    def used(self, tokens: float) -> None:
        """Replace the token estimate with the tokens used so far."""
        self.reported = tokens
        if self.limits is not None:
            self.limits.correct(self, tokens)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Record how the service responded to a request. The worst response counts: a refusal, then no answer.

        Args:
            accepted: True: the service answered. False: the service refused the call (HTTP 429, or 503 with
                ``Retry-After``). None: the service did not answer, so its capacity is unknown.
            retry_after: the seconds that the service asked to wait.
        """
        if accepted is False or (accepted is None and self._answer[0] is not False):
            self._answer = accepted, retry_after

    def leave(self, accepted: bool | None = None, retry_after: float | None = None) -> None:
        """End the permit, with the last response as for `answer`; later calls have no effect."""
        # A call ends its permits itself, and `Call.end` and the end of the connection end them again.
        if self.has_left:
            return
        self.has_left = True
        if not accepted:
            self.answer(accepted, retry_after)
        if self.limits is not None:
            self.limits.release(self, *self._answer)


def give_up(request: asyncio.Future[Permit]) -> None:
    """End a request for a permit: refuse it if it waits; end the permit if it was granted."""
    if not request.done():
        request.set_exception(LimitError(ABANDONED))
    elif not request.cancelled() and request.exception() is None:
        request.result().leave()


def limits_of(options: JobOptions) -> dict[str, LimitConfig]:
    """Return all limits by their names, those of models too."""
    # Without `max_wait`: a request waits only while others are in flight, and these have deadlines.
    models = {
        OF_MODEL + name: LimitConfig(max_concurrent=model.max_concurrent, max_wait=None)
        for name, model in options.models.items()
        if model.max_concurrent is not None
    }
    return options.limits | models


class Limits(ABC):
    """What all workers of a job share: limits, budget, failure bound, reasons to stop. For one event loop at a time.

    The code that constructs the object closes it. Functions and managers share limits by receiving the same object.
    """

    options: JobOptions
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that uses the limits now. Another one may use them after it has ended."""
    max_waits: dict[str, float | None]
    """Name of the limit -> maximum seconds that a call may wait; ``None`` for no maximum."""
    spent: str | None = None
    """Why no more calls are made, once the budget is used up."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self.max_waits = {name: config.max_wait for name, config in limits_of(options).items()}
        self.outages = Outages(options.outage_timeout_s)

    def bind(self) -> asyncio.AbstractEventLoop:
        """Bind to the running event loop, unless an earlier one still runs; return the event loop in use."""
        if self.loop is None or not self.loop.is_running():
            self.loop = asyncio.get_running_loop()
            # Calls of an earlier loop wait for nothing any more; the addresses that have answered stay.
            self.outages.open.clear()
        return self.loop

    def check_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running event loop, which is the one that uses the limits.

        Raises:
            LimitError: another event loop that still runs uses the limits.
        """
        loop = asyncio.get_running_loop()
        if self.loop is not loop and self.bind() is not loop:
            raise LimitError("these limits are in use by another event loop: create limits for each event loop")
        return loop

    def refusal(self, name: str) -> BudgetSpentError | LimitError:
        """Return the error of a request that cannot be granted: no budget is left, or the limit does not exist."""
        if self.spent is not None:
            return BudgetSpentError(self.spent)
        known = users_limits(self.max_waits)
        return LimitError(
            f"unknown limit {name!r}{did_you_mean(name, known) or '.'} Configured in "
            f"reward_loop.limits: {listing(known) or 'none'}"
        )

    @abstractmethod
    def request(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> asyncio.Future[Permit]:
        """Request a permit, on the running event loop. `give_up` ends the request.

        Args:
            name: the name of the limit.
            tokens: the estimated tokens of the call; 0 for the limit's own estimate.
            order: the age of the sample.

        Raises:
            LimitError: the limit does not exist or can never grant this permit, or another event loop uses the limits.
            BudgetSpentError: the budget is used up.
        """

    @abstractmethod
    def correct(self, permit: Permit, tokens: float) -> None:
        """Replace the token estimate of a permit."""

    @abstractmethod
    def release(self, permit: Permit, accepted: bool | None, retry_after: float | None) -> None:
        """End a permit; called by `Permit.leave`."""

    async def acquire(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> Permit:
        """Wait for a permit; end it with `Permit.leave`. See `request` for the arguments.

        Raises:
            LimitError: the permit was refused, or was not granted within the limit's ``max_wait``.
            BudgetSpentError: the budget is used up, perhaps only since the request.
        """
        return await self.granted(name, self.request(name, tokens, order))

    async def granted(self, name: str, request: asyncio.Future[Permit]) -> Permit:
        """Wait for a requested permit, as `acquire` does. If the wait fails or is cancelled, the request ends."""
        max_wait = self.max_waits.get(name)
        try:
            async with asyncio.timeout(max_wait):
                return await request
        except TimeoutError:
            give_up(request)
            raise LimitError(f"limit {name!r}: no permit within max_wait={max_wait:g} s") from None
        except BaseException:
            give_up(request)  # it may have been granted in the same turn of the event loop
            raise

    @abstractmethod
    def spend(self, cost: float, tokens: float) -> None:
        """Add a call's usage to the budget."""

    @abstractmethod
    def count(self, result: RewardResult) -> None:
        """Count one sample for the failure bound of the job.

        Raises:
            TooManyFailuresError: more than the allowed share of the recent samples failed. With workers, the trainer
                raises it.
        """

    @abstractmethod
    def stop(self, why: str) -> None:
        """Record why the run must stop."""

    async def arrived(self) -> None:  # noqa: B027  nothing to wait for in one process
        """Wait until the job has all that was reported before."""

    def close(self) -> None:
        """Release all resources; callable from any thread. A later use reopens the limits."""
        self.loop = None


def answer_of(error: BaseException | None) -> tuple[bool | None, float | None]:
    """Return the arguments of `Permit.leave` for a call that ended with this exception, or with none."""
    if error is None:
        return True, None
    pause = retry_after(error)
    return (False, pause) if is_refusal(error) or (status_of(error) == 503 and pause is not None) else (None, None)


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
        self._failures = FailureBound(
            options.max_failed_share, options.min_samples_for_failed_share, options.failed_share_window
        )
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.on_spent: Callable[[str], None] = lambda why: None
        """Called with the reason, once the budget is used up."""

    def request(self, name: str, tokens: float = 0, order: Order = (0.0, 0.0)) -> asyncio.Future[Permit]:
        loop = self.check_loop()
        if self.spent is not None or name not in self.limiters:
            raise self.refusal(name)
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
        limiter = self.limiters[permit.name]
        limiter.leave(time.monotonic(), accepted, retry_after)
        if limiter.queue:  # without one there is nothing to grant: most calls end here
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
        at = limiter.advance(time.monotonic())
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if at is not None and self.loop is not None:
            # 1 ms later, since too early a call would grant nothing.
            delay = max(0.0, at - time.monotonic()) + 0.001
            self._timers[name] = self.loop.call_later(delay, self._advance, name)

    def count(self, result: RewardResult) -> None:
        is_failed = result.outcome is Outcome.FAILED
        self.add_outcome(is_failed, result.error, result.cause if is_failed else None)

    def add_outcome(self, failed: bool, error: str | None, cause: str | None) -> None:
        """Count one sample for the failure bound, with its error message and cause if it failed."""
        self._outcomes += 1
        if self._outcomes == _SAMPLES_OF_A_BUDGET:
            self._check_budget()
        self._failures.add(failed, error, cause)

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
    """Counts recent outcomes; `add` raises if the share of failed samples exceeds the bound.

    Args:
        max_share: the allowed share of failed samples, from 0 to 1.
        min_samples: the number of outcomes before the bound applies.
        window: the number of recent outcomes that are counted; at least ``min_samples``.
    """

    def __init__(self, max_share: float, min_samples: int, window: int = 1024) -> None:
        self.max_share = max_share
        self.min_samples = min_samples
        # A smaller window than `min_samples` would never fill up to it: the bound would never apply.
        self._failed: deque[bool] = deque(maxlen=max(window, min_samples))
        self._causes: dict[str, str] = {}

    def add(self, failed: bool, error: str | None, cause: str | None) -> None:
        """Count one sample, with its error message and cause if it failed.

        Raises:
            TooManyFailuresError: the sample failed, and so did more than ``max_share`` of the recent samples.
        """
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
            latest = "\n".join(f"- {error}" for error in reversed(self._causes.values()))
            raise TooManyFailuresError(
                f"{failures} of the last {seen} samples failed, more than the share of {self.max_share:g} "
                f"that max_failed_share allows. The latest failure of each cause:\n{latest}\n"
                "Try the function on a few rows with `reward-loop check`. If this many failures are expected, raise "
                "max_failed_share (in a verl run reward_loop.max_failed_share, with a command -O max_failed_share)."
            )
