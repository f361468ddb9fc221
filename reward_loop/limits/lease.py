"""``reward_loop.limit``: the permits that reward functions acquire for their own calls to services."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.limits.call import Call, call_here, current_call
from reward_loop.limits.permit import Permit, answer_of


class Lease:
    """The object that ``limit`` yields: holds the permit and reports the call's usage.

    Outside of a reward function call, reports have no effect.
    """

    def __init__(self, call: Call | None, permit: Permit) -> None:
        self.call = call
        self.permit = permit
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
            # On the event loop of the limits, which are not thread-safe.
            self.call.run(self._used, amount("tokens", tokens), amount("cost", cost))

    def add(self, tokens: float, to_budget: bool = True) -> None:
        """Add the tokens of one more request, by default also to the run's budget."""
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


# A tuple: contexts share the value, so a list would show the leases of one task to others.
_leases: contextvars.ContextVar[tuple[Lease, ...]] = contextvars.ContextVar("reward_leases", default=())
"""The leases that the current code holds, the innermost first."""


def _forget_call() -> None:
    """Detach a forked copy of this process from the limits: its copies of the permits are not valid."""
    current_call.set(None)
    _leases.set(())


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
        BudgetSpentError: the run's budget is used up. Do not catch it: the sample then gets the policy ``at_cap``.

    Example::

        async with reward_loop.limit("judge", tokens=800) as lease:
            reply = await ask_judge(prompt)
            lease.used(tokens=reply.total_tokens)
    """

    def __init__(self, name: str, *, tokens: float = 0) -> None:
        self._name = name
        self._tokens = amount("tokens", tokens) or 0.0
        # The leases of all calls that share this object; `__exit__` finds its own by the context.
        self._open: dict[Lease, None] = {}

    async def __aenter__(self) -> Lease:
        call = call_here()
        return self._hold(call, None if call is None else await call.acquire(self._name, self._tokens))

    async def __aexit__(self, *raised: Any) -> None:
        self.__exit__(*raised)

    def __enter__(self) -> Lease:
        # Not `get_running_loop`, which raises in a thread without a loop.
        if asyncio._get_running_loop() is not None:
            # Blocking this loop would stop the limits that grant the permit.
            raise RuntimeError("in an async function, write `async with reward_loop.limit(...)`")
        call = call_here()
        return self._hold(call, None if call is None else call.acquire_in_thread(self._name, self._tokens))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        held = _leases.get()
        # If exited in another context than entered, as in a generator: any lease of this object.
        lease = next((lease for lease in held if lease in self._open), None) or next(reversed(self._open))
        # Not `reset`, which fails in another context than that of `__enter__`.
        _leases.set(tuple(other for other in held if other is not lease))
        del self._open[lease]
        if lease.call is not None:
            lease.call.run(lease.permit.leave, *answer_of(error))

    def _hold(self, call: Call | None, permit: Permit | None) -> Lease:
        lease = Lease(call, permit or Permit(None, self._name))
        _leases.set((lease, *_leases.get()))
        self._open[lease] = None
        return lease


def book_tokens(tokens: float) -> None:
    """Count the tokens of one request of the current code, once in each limit that it holds and in the budget."""
    counted: set[str] = set()
    for lease in _leases.get():
        if lease.call is not None and lease.permit.name not in counted:  # a limit may be held twice
            lease.add(tokens, to_budget=not counted)
            counted.add(lease.permit.name)
    if not counted and tokens and (call := call_here()) is not None:
        call.run(call.spend, 0.0, tokens)


def report_answer(accepted: bool | None, retry_after: float | None = None) -> None:
    """Report the response to a request of the current code to the limits that it holds; see `Permit.answer`."""
    for lease in _leases.get():
        lease.permit.answer(accepted, retry_after)
    if (call := call_here()) is not None:
        call.answer(accepted, retry_after)


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
