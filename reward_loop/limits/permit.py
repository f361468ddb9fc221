"""`Permit`, which a call holds while it runs under a limit, and `Limits`, the interface that grants permits.

A request for a permit is a future: pending while it waits, with the permit as its result, with an exception if it was
refused, cancelled if the caller no longer wants it. So the end of a call ends all its requests, granted or not, also
those of threads that still run (`Call.end`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from reward_loop._util.text import did_you_mean, listing
from reward_loop._util.transient import is_refusal, retry_after, status_of
from reward_loop.errors import BudgetSpentError, LimitError
from reward_loop.limits.options import JobOptions, LimitConfig
from reward_loop.limits.outages import Outages
from reward_loop.types import RewardResult

DEFAULT = "default"
"""The limit for every call of the reward function."""

REWARD_MODEL = "reward_model"
"""The limit for calls of functions that get the address of a reward model that the run serves."""

WHOLE_CALL = frozenset({DEFAULT, REWARD_MODEL})
"""The limits that apply to a whole call of the function; inside the function, they cannot be used."""

OF_MODEL = f"{REWARD_MODEL}/"
"""The beginning of the names of limits for the requests to one model."""

ABANDONED = "no permit was granted, because the call was cancelled or is past its deadline"

Order = tuple[float, float]
"""The age of a sample: its training step, and when it was submitted (`time.time`). The oldest gets the next permit."""


def users_limits(names: Iterable[str]) -> set[str]:
    """Return the names of limits that functions use by name."""
    return {name for name in names if name not in WHOLE_CALL and not name.startswith(OF_MODEL)}


class ModelRequests(NamedTuple):
    """What applies to the requests to a model, unless a request has its own."""

    limit: str | None = None
    """The name of the limit."""
    timeout: float | None = None
    """Seconds until the answer is received; ``None`` for the usual time."""


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

    def check(self, name: str) -> None:
        """Check that permits of a limit are granted.

        Raises:
            BudgetSpentError: the budget is used up.
            LimitError: the limit does not exist.
        """
        if self.spent is not None:
            raise BudgetSpentError(self.spent)
        if name not in self.max_waits:
            known = users_limits(self.max_waits)
            raise LimitError(
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
    def count(self, result: RewardResult, of: str = "") -> None:
        """Count one sample for the failure bound of the job, or of its component ``of``.

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
