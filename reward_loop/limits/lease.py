"""``reward_loop.limit``: the permits that reward functions take for their own calls to services."""

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

__all__ = ["CallScope", "Lease", "book_tokens", "current_scope", "limit", "report_answer"]

_PRUNE_AFTER = 16


class CallScope:
    """One call of a reward function: its permits, its usage, and how long it waits for limits.

    Args:
        limits: those of the job.
        traffic_class: ``train`` or ``validate``.
        loop: the event loop that uses ``limits``.
        permit: the permit for the whole call, if it has one; what the call uses counts there, too.
    """

    __slots__ = ("_depth", "_permits", "_sample", "_since", "_tokens", "_total", "_verdict", "abandoned", "limits",
                 "loop", "permit", "traffic_class")  # fmt: skip

    def __init__(
        self, limits: Limits, traffic_class: str, loop: asyncio.AbstractEventLoop, permit: Permit | None = None
    ) -> None:
        self.limits = limits
        self.traffic_class = traffic_class
        self.loop = loop
        self.permit = permit
        self.abandoned = False
        self._sample = current()
        self._permits: list[Permit] | None = None  # most calls have none
        self._depth = 0
        self._since = self._total = self._tokens = 0.0
        self._verdict: tuple[bool | None, float | None] = (True, None)

    def waited(self, now: float) -> float:
        """Return how many seconds, up to `time.monotonic` ``now``, the call waited for at least one limit."""
        return self._total + (now - self._since if self._depth else 0.0)

    def open(
        self, name: str, tokens: float, traffic_class: str, settled: Callable[[Permit], None] | None = None
    ) -> Permit:
        """Ask for a permit within the call, on its event loop; see `Limits.open`. Its own traffic class counts."""
        if self.abandoned:
            raise LimitError(ABANDONED)
        if not self._is_limited(name):
            permit = Permit(None, name, settled=settled)
            permit.grant()
            return permit
        waits = False

        def stops_waiting(permit: Permit) -> None:
            if waits:
                if self._sample is not None:
                    self._sample.answered(f"limit {name!r}")
                self._depth -= 1
                if not self._depth:
                    self._total += time.monotonic() - self._since
            if settled is not None:
                settled(permit)

        permit = self.limits.open(name, tokens, self.traffic_class, stops_waiting)
        if permit.state == WAITING:
            waits = True
            if self._sample is not None:
                self._sample.ask(f"limit {name!r}")
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
            raise LimitError(f"the limit {name!r} holds for the whole function: inside it, name another one")
        if name in self.limits.max_waits:
            return True
        others = self.limits.max_waits.keys() - {DEFAULT, RETRY}
        if others:
            raise LimitError(
                f"there is no limit {name!r}{did_you_mean(name, others) or '.'} Configured in "
                f"reward_loop.limits: {listing(others)}"
            )
        return False

    async def enter(self, name: str, tokens: float) -> Permit:
        """Wait for a permit, on any event loop.

        Raises:
            LimitError: no permit is granted to this call.
            JobServiceError: the service that keeps the limits cannot be reached.
        """
        if asyncio.get_running_loop() is self.loop:
            return await self._enter(name, tokens)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._enter(name, tokens), self.loop))

    def enter_in_thread(self, name: str, tokens: float) -> Permit:
        """As `enter`, for a thread without an event loop."""
        entering = asyncio.run_coroutine_threadsafe(self._enter(name, tokens), self.loop)
        try:
            return entering.result()
        except BaseException:
            entering.cancel()
            raise

    async def _enter(self, name: str, tokens: float) -> Permit:
        return await granted(lambda settled: self.open(name, tokens, self.traffic_class, settled))

    def spend(self, cost: float, tokens: float) -> None:
        """Count what the call used, on its event loop: for the budget, and for the permit of the whole call."""
        self._tokens += tokens
        if self.permit is not None and tokens:
            self.permit.used(self._tokens)
        self.limits.spend(cost, tokens)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop of the call: at once, or soon if this is another thread."""
        if asyncio._get_running_loop() is self.loop:
            function(*arguments)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Take down what a request of the call showed about the service."""
        self._verdict = _worse(self._verdict, (accepted, retry_after))

    def leave(self, error: BaseException | None, ended: bool = True) -> None:
        """End the permit of the whole call.

        Args:
            error: what the function raised.
            ended: whether the function returned or raised; not if it was cancelled or ran past its deadline.
        """
        if self.permit is not None:
            self.permit.leave(*_worse(self._verdict, answer_of(error) if ended else (None, None)))

    def end(self, abandoned: bool) -> None:
        """End the permits that the call still holds or waits for.

        Args:
            abandoned: whether the function may run on, as in a thread; then it is not granted further permits.
        """
        self.abandoned = self.abandoned or abandoned
        for permit in self._permits or ():
            permit.leave()


current_scope: contextvars.ContextVar[CallScope | None] = contextvars.ContextVar("reward_call_scope", default=None)
"""The call of a reward function that the running code is part of."""

current_lease: contextvars.ContextVar[Lease | None] = contextvars.ContextVar("reward_lease", default=None)
"""The innermost lease that the running code holds."""


def _current_call() -> CallScope | ProcessCall | None:
    if worker.is_worker:
        return None if worker.context is None else ProcessCall(*worker.context)
    return current_scope.get()


def _forget_call() -> None:
    """Leave the limits in a fork of this process: its copies of the permits are not valid."""
    current_scope.set(None)
    current_lease.set(None)


os.register_at_fork(after_in_child=_forget_call)


class Lease:
    """What ``limit`` yields: a permit, and the usage of the call. Outside of a reward function, it counts nothing."""

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

    def used(self, tokens: float | None = None, cost: float | None = None) -> None:
        """Report what the call used. The tokens replace the estimate; both count towards the run's budget.

        Args:
            tokens: all tokens of the call, as the service counts them; a later value replaces an earlier one.
            cost: in the unit of ``reward_loop.budget.max_cost``; a later value replaces an earlier one.

        Raises:
            ValueError: a value is not a finite number of 0 or more.
        """
        if self.call is not None:
            self.call.run(self._used, amount("tokens", tokens), amount("cost", cost))

    def add(self, tokens: float) -> None:
        """Report the tokens of one more request; `reward_loop.client` does so by itself."""
        if self.call is not None:
            self.call.run(self._add, amount("tokens", tokens))

    def refused(self, retry_after: float | None = None) -> None:
        """Report that the service answered 429, if the function does not raise that.

        Args:
            retry_after: the seconds that the service asked to wait.
        """
        self.answer(False, amount("retry_after", retry_after))

    def failed(self) -> None:
        """Report that the service did not answer (timeout, broken connection, 5xx), if the function does not raise."""
        self.answer(None, None)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Take down what a request showed about the service."""
        self._verdict = _worse(self._verdict, (accepted, retry_after))

    def end(self, error: BaseException | None) -> None:
        """End the permit."""
        if self._permit is not None and self.call is not None:
            self.call.run(self._permit.leave, *_worse(self._verdict, answer_of(error)))

    def _used(self, tokens: float | None, cost: float | None) -> None:
        assert self.call is not None
        if tokens is not None and self._permit is not None:
            self._permit.used(tokens)
        before = self._counted
        self._counted = (before[0] if tokens is None else tokens, before[1] if cost is None else cost)
        self.call.spend(self._counted[1] - before[1], self._counted[0] - before[0])

    def _add(self, tokens: float) -> None:
        self._used(self._counted[0] + tokens, None)


class limit:
    """``async with reward_loop.limit("judge", tokens=800) as lease:`` around a call to that service.

    Waits until ``reward_loop.limits.judge`` allows one more call, of all workers of the job together. The wait does not
    count towards the function's deadline. A sync function writes ``with``. Concurrent calls may share one object.

    Outside of a reward function that the reward loop calls, and where no limits are configured, nothing is limited, so
    that the function can be tried by itself.

    Args:
        name: the limit.
        tokens: the estimate of all tokens of the call, prompt and answer.

    Raises:
        ValueError: ``tokens`` is not a finite number of 0 or more.
        LimitError: the limit does not exist, can never allow this call, or did not allow it within ``max_wait``.
        JobServiceError: the service that keeps the limits of all workers cannot be reached.
    """

    def __init__(self, name: str, *, tokens: float = 0) -> None:
        self._name = name
        self._tokens = amount("tokens", tokens) or 0.0
        self._leases: dict[Lease, None] = {}

    async def __aenter__(self) -> Lease:
        call = _current_call()
        if call is None:
            return self._hold(Lease(opened_by=self))
        if isinstance(call, ProcessCall):
            return self._hold(Lease(*await call.enter_async(self._name, self._tokens), self))
        return self._hold(Lease(call, await call.enter(self._name, self._tokens), self))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._leave(error)
        if isinstance(lease.call, CallConnection):
            await lease.call.close_async()

    def __enter__(self) -> Lease:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("in an async function, write `async with reward_loop.limit(...)`")
        call = _current_call()
        if call is None:
            return self._hold(Lease(opened_by=self))
        if isinstance(call, ProcessCall):
            return self._hold(Lease(*call.enter(self._name, self._tokens), self))
        return self._hold(Lease(call, call.enter_in_thread(self._name, self._tokens), self))

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
            # Left in another context than entered, as by a generator; all leases of this object are equal.
            lease = next(reversed(self._leases))
        elif lease is innermost:
            current_lease.set(lease.outer)
        del self._leases[lease]
        lease.end(error)
        return lease


def book_tokens(tokens: float) -> None:
    """Count the tokens of one request of the running code, once in each limit that holds it and in the budget."""
    if (lease := current_lease.get()) is not None:
        lease.add(tokens)
    elif tokens and (call := _current_call()) is not None:
        call.run(call.spend, 0.0, tokens)


def report_answer(error: BaseException | None) -> None:
    """Report how a request of the running code ended to the adaptive limits that hold it."""
    answer = answer_of(error)
    if answer[0]:
        return
    if (lease := current_lease.get()) is not None:
        lease.answer(*answer)
    if (call := _current_call()) is not None:
        call.answer(*answer)


def _worse(one: tuple[bool | None, float | None], other: tuple[bool | None, float | None]) -> Any:
    """Return the stronger of two answers: a refusal, else no answer, else an answer."""
    for accepted in (False, None):
        for answer in (other, one):
            if answer[0] is accepted:
                return answer
    return one


def amount(name: str, value: Any) -> float | None:
    """Return a number of tokens, seconds or costs, of any library, as a `float`; ``None`` stays.

    Raises:
        ValueError: the value is not a finite number of 0 or more.
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
