"""`Call`: one attempt to call a reward function, with its deadline, waits, permits and usage; `limit`: permits within.

It has two clocks: *waits*, for a permit, a free place at a judge or the end of an outage, do not count; *work* does,
against the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import BudgetSpentError, ConfigError, LimitError
from reward_loop.limits.local import (
    ABANDONED,
    REWARD_MODEL,
    WHOLE_CALL,
    Limits,
    Order,
    Permit,
    answer_of,
    give_up,
    users_limits,
)
from reward_loop.processes import in_isolated_call
from reward_loop.records import ActiveSample, current, waiting_for

_SHORTEST_S = 0.01
"""The shortest time between two looks at the clock of a call, in seconds."""


# Slots, so no dict for each call: with thousands in flight, the garbage collector would visit them all.
@dataclass(eq=False, repr=False, slots=True)
class Call:
    """One attempt to call a reward function, for a sample or a batch; the running event loop is that of the limits.

    The deadline starts with the function, not in a queue, and waits for limits do not count: otherwise, samples would
    fail only because many others are in front of them. `waiting` alone measures the waits; the deadline and the outcome
    use it.

    Args:
        limits: the limits of the job.
        timeout: seconds from the start of the function to its deadline; ``None`` for no deadline.
        order: the age of the sample, by which its requests for permits are granted.
        attempt: 1 for the first call of the function for the sample, 2 for the first retry, and so on.
    """

    limits: Limits
    timeout: float | None = None
    order: Order = (0.0, 0.0)
    attempt: int = 1
    loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Any] = field(init=False)
    """The end of the call, set by the executor; at the deadline, it gets a `TimeoutError`."""
    started: float | None = field(init=False, default=None)
    """The start of the function by `time.monotonic`; ``None`` until then."""
    abandoned: bool = field(init=False, default=False)
    budget_error: BudgetSpentError | None = field(init=False, default=None)
    """Why a permit was refused within the function, if the budget is used up."""
    sample: ActiveSample | None = field(init=False, default_factory=current)
    _whole: tuple[Permit, ...] = field(init=False, default=())
    """The permits of the whole call. All tokens of the call count at the first one, too."""
    _requests: list[asyncio.Future[Permit]] = field(init=False, default_factory=list)
    """All requests within the function, granted and ended ones too."""
    _waits: int = field(init=False, default=0)
    _waiting_since: float = field(init=False, default=0.0)
    _waited: float = field(init=False, default=0.0)
    _waited_before: float = field(init=False, default=0.0)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()
        if self.limits.loop is not self.loop:
            self.limits.bind()

    def begin(self) -> None:
        """Start the clock of the deadline; later calls have no effect. Executors call this as the function starts.

        Thread-safe.
        """
        # Waits before the start are queueing, and must not extend the deadline.
        if self.started is None:
            self.started = time.monotonic()
            self._waited_before = self._waited

    @property
    def waited(self) -> float:
        """The seconds for which the call has waited for at least one limit, before and after its start."""
        return self._waited + (time.monotonic() - self._waiting_since if self._waits else 0.0)

    @property
    def waited_inside(self) -> float:
        """The seconds for which the function has waited for at least one limit, since it started."""
        return 0.0 if self.started is None else self.waited - self._waited_before

    def watch(self) -> None:
        """Set a `TimeoutError` on the future at the deadline, if there is one, until `end`."""
        if self.timeout is None or self.future.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        # A call that has not started has its full timeout left.
        left = self.timeout
        if self.started is not None:
            left += self.started + self.waited_inside - time.monotonic()
        if self.started is None or left > 0:
            # While the call waits, `left` does not shrink: with a tiny one, the loop would spin.
            self._timer = self.loop.call_later(max(left, _SHORTEST_S), self.watch)
        else:
            # Set with the error: a thread cannot be stopped, and must get no more permits.
            self.abandoned = True
            self.future.set_exception(TimeoutError())

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Stop the clock of the deadline in the block; see `begin_wait`."""
        self.begin_wait(what)
        try:
            yield
        finally:
            self.end_wait(what)

    def begin_wait(self, what: str) -> None:
        """Stop the clock of the deadline, on the call's event loop, until `end_wait`."""
        # Requests of one call may wait at the same time; their time counts once.
        if not self._waits:
            self._waiting_since = time.monotonic()
        self._waits += 1
        if self.sample is not None:
            self.sample.ask(what)

    def end_wait(self, what: str) -> None:
        """End a wait for `what`."""
        self._waits -= 1
        if not self._waits:
            self._waited += time.monotonic() - self._waiting_since
        if self.sample is not None:
            self.sample.answered(what)

    async def enter(self, names: list[str]) -> None:
        """Acquire the permits of the whole call, in this order, of the limits that are configured.

        Raises:
            LimitError, BudgetSpentError: as `Limits.acquire`.
        """
        for name in names:
            if name in self.limits.max_waits:
                # Not among `_requests`: `Limits.granted` ends a request that is still waiting.
                request = self.limits.request(name, 0, self.order)
                # Most requests are granted at once: without a coroutine, and without a wait in the records.
                permit = request.result() if request.done() else await self._granted(name, request)
                self._whole = (*self._whole, permit)

    async def acquire(self, name: str, tokens: float) -> Permit:
        """Acquire a permit within the function, on any event loop; raises as `Limits.acquire` does."""
        # A sync function may run its own event loop in its thread; the limits belong to that of the call.
        if asyncio.get_running_loop() is self.loop:
            return await self._acquire_inside(name, tokens)
        # If this is cancelled as the permit is granted, the permit ends with the call.
        return await asyncio.wrap_future(self._acquire_threadsafe(name, tokens))

    def acquire_in_thread(self, name: str, tokens: float) -> Permit:
        """Acquire a permit, as `acquire` does, in a thread without an event loop."""
        return self._acquire_threadsafe(name, tokens).result()

    def _acquire_threadsafe(self, name: str, tokens: float) -> Future[Permit]:
        return asyncio.run_coroutine_threadsafe(self._acquire_inside(name, tokens), self.loop)

    async def _acquire_inside(self, name: str, tokens: float) -> Permit:
        # A thread cannot be killed: past its deadline, its function may still ask.
        if self.abandoned:
            raise LimitError(ABANDONED)
        # The call holds this permit: asking for a second one could wait for itself for ever.
        if name in WHOLE_CALL:
            raise LimitError(
                f"the limit {name!r} already applies to the whole function: inside the function, use another"
            )
        try:
            if self.limits.spent is not None:  # also without configured limits
                raise BudgetSpentError(self.limits.spent)
            if name not in self.limits.max_waits and not users_limits(self.limits.max_waits):
                return Permit(None, name)
            request = self.limits.request(name, tokens, self.order)
            self._requests.append(request)
            return request.result() if request.done() else await self._granted(name, request)
        except BudgetSpentError as error:
            self.budget_error = error
            raise

    async def _granted(self, name: str, request: asyncio.Future[Permit]) -> Permit:
        what = f"limit {name!r}"
        if name == REWARD_MODEL:
            what = f"a free place at the reward model ({what})"
        with self.waiting(what):
            return await self.limits.granted(name, request)

    def spend(self, cost: float, tokens: float) -> None:
        """Add usage to the budget, the permit of the whole call and the sample. Must run on the call's event loop."""
        if self._whole and tokens:
            self._whole[0].used(self._whole[0].reported + tokens)
        if self.sample is not None:
            self.sample.cost += cost
        self.limits.spend(cost, tokens)

    def answer(self, accepted: bool | None, retry_after: float | None) -> None:
        """Record how the service responded to a request of the call; see `Permit.answer`."""
        if self._whole:
            self._whole[0].answer(accepted, retry_after)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the call's event loop: at once, or by `call_soon_threadsafe` from elsewhere."""
        # Not `get_running_loop`, which raises in a thread without a loop.
        if asyncio._get_running_loop() is self.loop:
            function(*arguments)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def end(self, abandoned: bool, accepted: bool | None = None, retry_after: float | None = None) -> None:
        """End all permits that the call holds or waits for.

        Args:
            abandoned: the function may still be running, as in a thread; further permits are then refused.
            accepted, retry_after: how the service responded to the whole call; see `Permit.answer`.
        """
        self.abandoned = self.abandoned or abandoned
        if self._timer is not None:
            self._timer.cancel()
        for permit in self._whole:
            permit.leave(accepted, retry_after)
        # Also those of a thread that still runs: otherwise their permits would never end.
        for request in self._requests:
            give_up(request)


class Deadlines:
    """Looks at the clocks of a function's calls when their deadlines may have passed.

    Calls with the same timeout need one timer: that of the oldest. A timer for each call would take a twelfth of the
    time for a sample (`benchmarks.scoring`). Calls with another timeout have their own.

    Args:
        timeout: seconds from the start of the function to the deadline of most calls; ``None`` for no deadline.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._due: dict[Call, float] = {}
        """When the clocks of the calls are looked at, the oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Call) -> None:
        """Watch a call until `discard`."""
        if call.timeout is None:
            return
        if call.timeout != self.timeout:
            call.watch()
            return
        if self._loop is not call.loop:
            # Only after the end of an event loop: otherwise, its timer would look at the calls of another thread.
            if self._loop is not None and not self._loop.is_closed():
                call.watch()
                return
            self._loop, self._timer, self._due = call.loop, None, {}
        self._due[call] = time.monotonic() + call.timeout
        if self._timer is None:
            # The timer would keep this call, with its sample, in its context.
            self._timer = call.loop.call_later(call.timeout, self._look, context=contextvars.Context())

    def discard(self, call: Call) -> None:
        """Do not watch a call any more."""
        self._due.pop(call, None)

    def _look(self) -> None:
        self._timer, now = None, time.monotonic()
        while self._due:
            call, due = next(iter(self._due.items()))
            if due > now:
                self._timer = call.loop.call_later(due - now, self._look)
                return
            del self._due[call]
            call.watch()  # it may have started later, or have waited


current_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("current_call", default=None)
"""The call that the current code belongs to."""


def call_here() -> Call | None:
    """Return the call of a reward function that the current code belongs to.

    Raises:
        ConfigError: it is an isolated call, whose process has neither limits nor records.
    """
    if in_isolated_call():
        raise ConfigError(
            "an isolated function cannot ask a judge by reward_loop, nor hold its limits: ask it in an `async def` "
            "function, or let this one run in threads, without `isolated` and isolation=process"
        )
    return current_call.get()


@contextlib.contextmanager
def outside_the_deadline(what: str) -> Iterator[None]:
    """Stop the clock of the deadline within ``with``, in any thread of the function, and record the wait for `what`."""
    if (call := call_here()) is None:  # a sample may be active all the same, for example in a manager of the user
        with waiting_for(current(), what):
            yield
        return
    call.run(call.begin_wait, what)
    try:
        yield
    finally:
        call.run(call.end_wait, what)


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
