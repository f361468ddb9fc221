"""``reward_loop.limit``: the permits that reward functions acquire for their own calls to services."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.limits.permit import Permit, answer_of
from reward_loop.limits.process_call import ProcessCall, current_call
from reward_loop.limits.scope import CallScope, current_scope

__all__ = ["Lease", "book_tokens", "limit", "report_failure"]


class Lease:
    """The object that ``limit`` yields: holds the permit and reports the call's usage.

    Outside of a reward function call, reports have no effect.
    """

    def __init__(
        self, call: CallScope | ProcessCall | None, permit: Permit, opened_by: limit, outer: Lease | None
    ) -> None:
        self.call = call
        self.permit = permit
        self.opened_by = opened_by
        self.outer = outer
        self._cost = 0.0

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
        self.permit.answer(False, amount("retry_after", retry_after))

    def failed(self) -> None:
        """Report a request without an answer: timeout, broken connection or HTTP 5xx.

        Needed only if no exception leaves the ``with`` block.
        """
        self.permit.answer(None, None)

    def end(self, error: BaseException | None) -> None:
        """End the permit. ``error`` is the exception that left the ``with`` block, if any."""
        if self.call is not None:
            self.call.run(self.permit.leave, *answer_of(error))

    def _used(self, tokens: float | None, cost: float | None, to_budget: bool = True) -> None:
        assert self.call is not None
        tokens_before, cost_before = self.permit.reported, self._cost
        if tokens is not None:
            self.permit.used(tokens)
        if cost is not None:
            self._cost = cost
        if to_budget:
            self.call.spend(self._cost - cost_before, self.permit.reported - tokens_before)

    def _add(self, tokens: float, to_budget: bool) -> None:
        self._used(self.permit.reported + tokens, None, to_budget)


_current_lease: contextvars.ContextVar[Lease | None] = contextvars.ContextVar("reward_lease", default=None)
"""The innermost lease that the current code holds."""


def _forget_call() -> None:
    """Detach a forked copy of this process from the limits: its copies of the permits are not valid."""
    current_scope.set(None)
    _current_lease.set(None)


os.register_at_fork(after_in_child=_forget_call)


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
        return self._hold(call, None if call is None else await call.enter(self._name, self._tokens))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._leave(error)
        if isinstance(call, ProcessCall):
            await call.close_async()

    def __enter__(self) -> Lease:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("in an async function, write `async with reward_loop.limit(...)`")
        call = current_call()
        return self._hold(call, None if call is None else call.enter_in_thread(self._name, self._tokens))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call = self._leave(error)
        if isinstance(call, ProcessCall):
            call.close()

    def _hold(self, call: CallScope | ProcessCall | None, permit: Permit | None) -> Lease:
        lease = Lease(call, permit or Permit(None, self._name), self, _current_lease.get())
        _current_lease.set(lease)
        self._leases[lease] = None
        return lease

    def _leave(self, error: BaseException | None) -> CallScope | ProcessCall | None:
        """End a lease of this object, and return its call."""
        lease = innermost = _current_lease.get()
        while lease is not None and lease.opened_by is not self:
            lease = lease.outer
        if lease is None or lease not in self._leases:
            # Exited in another context than entered, as in a generator: use any lease of this object.
            lease = next(reversed(self._leases))
        elif lease is innermost:
            _current_lease.set(lease.outer)
        del self._leases[lease]
        lease.end(error)
        return lease.call


def book_tokens(tokens: float) -> None:
    """Count the tokens of one request of the current code, once in each limit that it holds and in the budget."""
    counted: set[str] = set()
    for lease in _leases():
        if lease.permit.name not in counted:  # a limit may be held twice
            lease.add(tokens, to_budget=not counted)
            counted.add(lease.permit.name)
    if not counted and tokens and (call := current_call()) is not None:
        call.run(call.spend, 0.0, tokens)


def report_failure(error: BaseException) -> None:
    """Report a failed request of the current code to the adaptive limits that it holds."""
    answer = answer_of(error)
    for lease in _leases():
        lease.permit.answer(*answer)
    if (call := current_call()) is not None:
        call.answer(*answer)


def _leases() -> Iterator[Lease]:
    """Yield the leases that the current code holds within a call, the innermost first."""
    lease = _current_lease.get()
    while lease is not None:
        if lease.call is not None:
            yield lease
        lease = lease.outer


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
