"""``reward_loop.limit``: the permits that reward functions acquire for their own calls to services."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from reward_loop._util.text import did_you_mean, listing, shorten
from reward_loop.errors import LimitError
from reward_loop.limits.client import CallConnection, ProcessCall
from reward_loop.limits.permit import ABANDONED, DEFAULT, ENDED, RETRY, WAITING, Limits, Permit, answer_of, granted
from reward_loop.processes import worker
from reward_loop.records import current

__all__ = ["CallScope", "Lease", "current_call", "current_lease", "current_scope", "limit"]

_PRUNE_AFTER = 16


class CallScope:
    """One call of a reward function: its permits, its usage, and its time of waiting for limits.

    Args:
        limits: the limits of the job.
        traffic_class: ``train`` or ``validate``.
        loop: the event loop that uses ``limits``.
        permit: the permit of the whole call, if any. The call's tokens are counted there, too.
        attempt: 1 for the first call of the function for the sample, 2 for the first retry, and so on.
    """

    __slots__ = ("_depth", "_permits", "_since", "_tokens", "_total", "_verdict", "abandoned", "attempt", "limits",
                 "loop", "permit", "sample", "traffic_class")  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        traffic_class: str,
        loop: asyncio.AbstractEventLoop,
        permit: Permit | None = None,
        attempt: int = 1,
    ) -> None:
        self.limits, self.loop = limits, loop
        self.traffic_class = traffic_class
        self.permit = permit
        self.attempt, self.abandoned = attempt, False
        self.sample = current()
        self._permits: list[Permit] | None = None  # most calls have none
        self._depth = 0
        self._since = self._total = self._tokens = 0.0
        self._verdict: tuple[bool | None, float | None] = (True, None)

    def waited(self, now: float) -> float:
        """Return the seconds, up to `time.monotonic` ``now``, during which the call waited for at least one limit."""
        return self._total + (now - self._since if self._depth else 0.0)

    def open(
        self, name: str, tokens: float, traffic_class: str, settled: Callable[[Permit], None] | None = None
    ) -> Permit:
        """Request a permit within the call, on its event loop; see `Limits.open`.

        ``traffic_class`` is ignored: the call's own traffic class applies.
        """
        if self.abandoned:
            raise LimitError(ABANDONED)
        if not self._is_limited(name):
            permit = Permit(None, name, settled=settled)
            permit.grant()
            return permit
        waits = False

        def stops_waiting(permit: Permit) -> None:
            if waits:
                if self.sample is not None:
                    self.sample.answered(f"limit {name!r}")
                self._depth -= 1
                if not self._depth:
                    self._total += time.monotonic() - self._since
            if settled is not None:
                settled(permit)

        permit = self.limits.open(name, tokens, self.traffic_class, stops_waiting)
        if permit.state == WAITING:
            waits = True
            if self.sample is not None:
                self.sample.ask(f"limit {name!r}")
            if not self._depth:
                self._since = time.monotonic()
            self._depth += 1
        permits = self._permits or []
        if len(permits) >= _PRUNE_AFTER:
            permits = [other for other in permits if other.state != ENDED]
        self._permits = [*permits, permit]
        return permit

    def _is_limited(self, name: str) -> bool:
        if name in (DEFAULT, RETRY):
            raise LimitError(
                f"the limit {name!r} already applies to the whole function: inside the function, use another"
            )
        if name in self.limits.max_waits:
            return True
        others = self.limits.max_waits.keys() - {DEFAULT, RETRY}
        if others:
            raise LimitError(
                f"there is no limit {name!r}{did_you_mean(name, others) or '.'} Configured in "
                f"reward_loop.limits: {listing(others)}"
            )
        return False

    async def enter(self, name: str, tokens: float) -> tuple[CallScope, Permit]:
        """Wait for a permit, on any event loop. Return this object and the permit, as `ProcessCall.enter` does.

        Raises:
            LimitError: the permit was refused.
            JobServiceError: the limiter service is unreachable.
        """
        if asyncio.get_running_loop() is self.loop:
            return self, await self._enter(name, tokens)
        return self, await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._enter(name, tokens), self.loop))

    def enter_in_thread(self, name: str, tokens: float) -> tuple[CallScope, Permit]:
        """Wait for a permit, as `enter` does, in a thread without an event loop."""
        entering = asyncio.run_coroutine_threadsafe(self._enter(name, tokens), self.loop)
        try:
            return self, entering.result()
        except BaseException:
            entering.cancel()
            raise

    async def _enter(self, name: str, tokens: float) -> Permit:
        return await granted(lambda settled: self.open(name, tokens, self.traffic_class, settled))

    def spend(self, cost: float, tokens: float) -> None:
        """Add usage to the budget, the permit of the whole call and the sample. Must run on the call's event loop."""
        self._tokens += tokens
        if self.permit is not None and tokens:
            self.permit.used(self._tokens)
        if self.sample is not None:
            self.sample.cost += cost
        self.limits.spend(cost, tokens)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the call's event loop: at once, or by `call_soon_threadsafe` from elsewhere."""
        if asyncio._get_running_loop() is self.loop:
            function(*arguments)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Record how the service responded to a request of the call, with the arguments of `Permit.leave`."""
        self._verdict = _worse(self._verdict, (accepted, retry_after))

    def leave(self, error: BaseException | None, ended: bool = True) -> None:
        """End the permit of the whole call.

        Args:
            error: the exception that the function raised, if any.
            ended: whether the function returned or raised; false if it was cancelled or ran past its deadline.
        """
        if self.permit is not None:
            self.permit.leave(*_worse(self._verdict, answer_of(error) if ended else (None, None)))

    def end(self, abandoned: bool) -> None:
        """End all permits that the call holds or waits for.

        Args:
            abandoned: whether the function may still be running, as in a thread; further permits are then refused.
        """
        self.abandoned = self.abandoned or abandoned
        for permit in self._permits or ():
            permit.leave()


current_scope: contextvars.ContextVar[CallScope | None] = contextvars.ContextVar("reward_call_scope", default=None)
"""The reward function call that the current code belongs to."""

current_lease: contextvars.ContextVar[Lease | None] = contextvars.ContextVar("reward_lease", default=None)
"""The innermost lease that the current code holds."""


def current_call() -> CallScope | ProcessCall | None:
    """Return the reward function call that the current code belongs to, also in a worker process."""
    if worker.is_worker:
        return None if worker.context is None else ProcessCall(*worker.context)
    return current_scope.get()


def _forget_call() -> None:
    """Detach a forked copy of this process from the limits: its copies of the permits are not valid."""
    current_scope.set(None)
    current_lease.set(None)


os.register_at_fork(after_in_child=_forget_call)


class Lease:
    """The object that ``limit`` yields: holds the permit and reports the call's usage.

    Outside of a reward function call, reports have no effect.
    """

    def __init__(
        self,
        call: CallScope | CallConnection | None = None,
        permit: Permit | None = None,
        opened_by: limit | None = None,
    ) -> None:
        self.call = call
        self.opened_by = opened_by
        self.outer: Lease | None = None
        self._permit = permit
        self._counted = (0.0, 0.0)
        self._verdict: tuple[bool | None, float | None] = (True, None)

    @property
    def name(self) -> str:
        """The name of the limit; empty outside of a reward function call."""
        return "" if self._permit is None else self._permit.name

    def used(self, tokens: float | None = None, cost: float | None = None) -> None:
        """Report the call's usage. The tokens replace the estimate; tokens and cost count towards the run's budget.

        Args:
            tokens: the total tokens of the call, as counted by the service; a later value replaces an earlier one.
            cost: the cost in the unit of ``reward_loop.budget.max_cost``; a later value replaces an earlier one.

        Raises:
            ValueError: a value is not a finite number of 0 or more.
        """
        if self.call is not None:
            self.call.run(self._used, amount("tokens", tokens), amount("cost", cost))

    def add(self, tokens: float, to_budget: bool = True) -> None:
        """Add the tokens of one more request. `reward_loop.client` calls this automatically.

        Args:
            tokens: the tokens of the request.
            to_budget: whether the tokens also count towards the run's budget.
        """
        if self.call is not None:
            self.call.run(self._add, amount("tokens", tokens), to_budget)

    def refused(self, retry_after: float | None = None) -> None:
        """Report that the service refused a request (HTTP 429). Needed only if no exception leaves the ``with`` block.

        Args:
            retry_after: the seconds that the service asked to wait.

        Raises:
            ValueError: ``retry_after`` is not a finite number of 0 or more.
        """
        self.answer(False, amount("retry_after", retry_after))

    def failed(self) -> None:
        """Report a request without an answer: timeout, broken connection or HTTP 5xx.

        Needed only if no exception leaves the ``with`` block.
        """
        self.answer(None, None)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Record how the service responded to a request, with the arguments of `Permit.leave`."""
        self._verdict = _worse(self._verdict, (accepted, retry_after))

    def end(self, error: BaseException | None) -> None:
        """End the permit. ``error`` is the exception that left the ``with`` block, if any."""
        if self._permit is not None and self.call is not None:
            self.call.run(self._permit.leave, *_worse(self._verdict, answer_of(error)))

    def _used(self, tokens: float | None, cost: float | None, to_budget: bool = True) -> None:
        assert self.call is not None
        if tokens is not None and self._permit is not None:
            self._permit.used(tokens)
        before = self._counted
        self._counted = (before[0] if tokens is None else tokens, before[1] if cost is None else cost)
        if to_budget:
            self.call.spend(self._counted[1] - before[1], self._counted[0] - before[0])

    def _add(self, tokens: float, to_budget: bool) -> None:
        self._used(self._counted[0] + tokens, None, to_budget)


class limit:
    """A context manager that holds a permit of a configured limit during a call to a service.

    Waits until the limit ``reward_loop.limits.<name>``, which all workers of the job share, allows one more call. The
    wait does not count towards the function's deadline. Use ``async with`` in async functions and ``with`` in sync
    functions. Concurrent calls may share one object.

    If no limits are configured, or the function is not called by the reward loop, nothing is limited. So the function
    can also be run directly, for instance in a test.

    Args:
        name: the name of the limit.
        tokens: the estimated total tokens of the call, prompt and completion.

    Raises:
        ValueError: ``tokens`` is not a finite number of 0 or more.
        LimitError: the limit does not exist, can never allow this call, or did not allow it within ``max_wait``.
        JobServiceError: the limiter service is unreachable.

    Example::

        async with reward_loop.limit("judge", tokens=800) as lease:
            reply = await ask_judge(prompt)
            lease.used(tokens=reply.total_tokens)
    """

    def __init__(self, name: str, *, tokens: float = 0) -> None:
        self._name = name
        self._tokens = amount("tokens", tokens) or 0.0
        self._leases: dict[Lease, None] = {}

    async def __aenter__(self) -> Lease:
        call = current_call()
        if call is None:
            return self._hold(Lease(opened_by=self))
        holder, permit = await call.enter(self._name, self._tokens)
        return self._hold(Lease(holder, permit, self))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._leave(error)
        if isinstance(lease.call, CallConnection):
            await lease.call.close_async()

    def __enter__(self) -> Lease:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("in an async function, write `async with reward_loop.limit(...)`")
        call = current_call()
        if call is None:
            return self._hold(Lease(opened_by=self))
        holder, permit = call.enter_in_thread(self._name, self._tokens)
        return self._hold(Lease(holder, permit, self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._leave(error)
        if isinstance(lease.call, CallConnection):
            lease.call.close()

    def _hold(self, lease: Lease) -> Lease:
        lease.outer = current_lease.get()
        current_lease.set(lease)
        self._leases[lease] = None
        return lease

    def _leave(self, error: BaseException | None) -> Lease:
        lease = innermost = current_lease.get()
        while lease is not None and lease.opened_by is not self:
            lease = lease.outer
        if lease is None or lease not in self._leases:
            # Exited in another context than entered, as in a generator: use any lease of this object.
            lease = next(reversed(self._leases))
        elif lease is innermost:
            current_lease.set(lease.outer)
        del self._leases[lease]
        lease.end(error)
        return lease


def _worse(one: tuple[bool | None, float | None], other: tuple[bool | None, float | None]) -> Any:
    """Return the worse of two responses: a refusal (False) before no answer (None) before an answer (True)."""
    if other[0] or (other[0] is None and one[0] is False):
        return one
    return other


def amount(name: str, value: Any) -> float | None:
    """Convert a number of tokens, seconds or cost to `float`; ``None`` stays ``None``.

    Raises:
        ValueError: the value is not a finite number of 0 or more.
    """
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a finite number, 0 or more; got {shorten(value)}")
    return number
