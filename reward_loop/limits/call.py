"""`Call`: one attempt to call a reward function, with its deadline, its waits, its permits and its usage.

A call in a thread may lose time to other threads that compute; `SharedTime` measures it, and the deadline waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_loop.errors import BudgetSpentError, ConfigError, LimitError
from reward_loop.limits.options import JobOptions
from reward_loop.limits.permit import (
    ABANDONED,
    MAX_PATIENCE,
    OF_MODEL,
    REWARD_MODEL,
    WHOLE_CALL,
    Limits,
    ModelRequests,
    Permit,
    give_up,
    users_limits,
)
from reward_loop.processes import in_isolated_call
from reward_loop.records import ActiveSample, current, waiting_for


class RequestRetries(NamedTuple):
    """How the requests of a function are repeated."""

    max_attempts: int
    """The largest number of attempts of a request."""
    first_pause_s: float
    waits_for_outages: bool
    """Whether the function is called again after an outage."""


MAX_SHARED_S = 60.0
"""The largest number of seconds that are added to the deadline of a call."""

_BUSY = 0.1
"""The share of the time for which the process must compute, so that its threads can be short of it. Low, since other
processes may use the cores."""

_OWN_S = 0.002
"""The seconds for which a thread must compute between two measurements, so that it does not merely wait."""

_SHARING_S = 3.0
"""The shortest time in seconds between two looks at a call that shares the global lock: within it, each of many threads
gets the lock."""


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
        traffic_class: ``train`` or ``validate``.
        attempt: 1 for the first call of the function for the sample, 2 for the first retry, and so on.
    """

    limits: Limits
    timeout: float | None = None
    traffic_class: str = "train"
    attempt: int = 1
    loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    future: asyncio.Future[Any] = field(init=False)
    """The end of the call, set by the executor; at the deadline, `Deadlines` sets a `TimeoutError`."""
    started: float | None = field(init=False, default=None)
    """The start of the function by `time.monotonic`; ``None`` until then."""
    shared: SharedTime | None = field(init=False, default=None)
    """What the function loses to other threads; ``None`` if it does not run in a thread."""
    shared_s: float = field(init=False, default=0.0)
    abandoned: bool = field(init=False, default=False)
    budget_error: BudgetSpentError | None = field(init=False, default=None)
    """Why a permit was refused within the function, if the budget is used up."""
    sample: ActiveSample | None = field(init=False, default_factory=current)
    _whole: tuple[Permit, ...] = field(init=False, default=())
    """The permits of the whole call. All tokens of the call count at the first one, too."""
    _requests: list[asyncio.Future[Permit]] = field(init=False, default_factory=list)
    """All requests within the function, granted ones too; ended ones are removed when there are `_prune_at`."""
    _prune_at: int = field(init=False, default=16)
    _waits: int = field(init=False, default=0)
    _waiting_since: float = field(init=False, default=0.0)
    _waited: float = field(init=False, default=0.0)
    _waited_before: float = field(init=False, default=0.0)
    _measured_at: float = field(init=False, default=0.0)

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

    def lost_s(self) -> float:
        """Return the seconds since the start that do not count: for limits, and for other threads that compute."""
        waited = self.waited_inside
        if self.shared is not None:
            self.shared_s = self.shared.measure(waited - self._measured_at)
            self._measured_at = waited
        return waited + self.shared_s

    @property
    def patience(self) -> float:
        """How many times its deadline the call may take; see `Limits.patience`."""
        # The place at the reward model is acquired last, so that no call holds it while it waits for another limit.
        return self.limits.patience if self._whole and self._whole[-1].name == REWARD_MODEL else 1.0

    @property
    def request_retries(self) -> RequestRetries:
        """How requests of the function are repeated."""
        options = self.limits.options
        waits = options.outage_timeout_s > 0
        return RequestRetries(options.retry.max_attempts, options.retry.initial_wait, waits)

    @property
    def models(self) -> Mapping[str, ModelRequests]:
        """What applies to the requests to each model, by its name.

        Only with limits that the job has: a limiter service may have others than the options.
        """
        known, models = self.limits.max_waits, self.limits.options.models
        limits = {name: OF_MODEL + name for name, model in models.items() if model.max_concurrent}
        limits = {name: limit for name, limit in limits.items() if limit in known}
        return {name: ModelRequests(limits.get(name), model.timeout) for name, model in models.items()}

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
            LimitError, BudgetSpentError, JobServiceError: as `Limits.acquire`.
        """
        for name in names:
            if name in self.limits.max_waits:
                # Not among `_requests`: `Limits.granted` ends a request that is still waiting.
                request = self.limits.request(name, 0, self.traffic_class)
                # Most requests are granted at once: without a coroutine, and without a wait in the records.
                permit = request.result() if request.done() else await self._granted(name, request)
                self._whole = (*self._whole, permit)

    async def acquire(self, name: str, tokens: float) -> Permit:
        """Acquire a permit within the function, on any event loop; raises as `Limits.acquire` does."""
        # A sync function may run its own event loop in its thread; the limits belong to that of the call.
        if asyncio.get_running_loop() is self.loop:
            return await self._acquire_inside(name, tokens)
        acquiring = self._acquire_threadsafe(name, tokens)
        try:
            return await asyncio.wrap_future(acquiring)
        except BaseException:
            self._give_up(acquiring)
            raise

    def acquire_in_thread(self, name: str, tokens: float) -> Permit:
        """Acquire a permit, as `acquire` does, in a thread without an event loop."""
        acquiring = self._acquire_threadsafe(name, tokens)
        try:
            return acquiring.result()
        except BaseException:
            self._give_up(acquiring)
            raise

    def _give_up(self, acquiring: Future[Permit]) -> None:
        # It may have been granted in the meantime: then it would never end.
        if not acquiring.cancel() and not acquiring.cancelled() and acquiring.exception() is None:
            self.run(acquiring.result().leave)

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
            request = self._request(name, tokens)
            return request.result() if request.done() else await self._granted(name, request)
        except BudgetSpentError as error:
            self.budget_error = error
            raise

    def _request(self, name: str, tokens: float) -> asyncio.Future[Permit]:
        request = self.limits.request(name, tokens, self.traffic_class)
        if len(self._requests) >= self._prune_at:
            self._requests = [other for other in self._requests if not _is_over(other)]
            self._prune_at = max(16, 2 * len(self._requests))
        self._requests.append(request)
        return request

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
        for permit in self._whole:
            if permit.name == REWARD_MODEL and self.timeout is not None and self.started is not None:
                permit.share = (time.monotonic() - self.started - self.waited_inside) / self.timeout
            permit.leave(accepted, retry_after)
        # Also those of a thread that still runs: otherwise their permits would never end.
        for request in self._requests:
            give_up(request)


def _is_over(request: asyncio.Future[Permit]) -> bool:
    if not request.done():
        return False
    return request.cancelled() or request.exception() is not None or request.result().has_left


current_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("reward_call", default=None)
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


class Deadlines:
    """Expires calls at their deadlines, on one event loop.

    Watch calls with the same timeout in the order in which they will start. One timer, for the oldest call, then serves
    all of them: a timer for each call would take 2 us per sample.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: dict[float, OrderedDict[Call, None]] = {}

    def watch(self, call: Call) -> None:
        """Watch a call, if it has a deadline, until `forget` is called."""
        if call.timeout is None:
            return
        calls = self._calls.get(call.timeout)
        if calls is None:
            # Not a dict, which looks for its first item past the places of all that were deleted.
            calls = self._calls[call.timeout] = OrderedDict()
            self.loop.call_later(call.timeout, self._look, call.timeout)
        calls[call] = None

    def continue_with(self, call: Call) -> None:
        """Watch the new future of a call that has started, until the deadline that it has had from its start."""
        self.forget(call)
        # The last measurement in the thread: what it has lost still counts, and the awaitable runs on the event loop.
        call.lost_s()
        call.shared = None
        if call.timeout is not None and call.started is not None:
            self._expire(call, call.started + call.timeout)

    def forget(self, call: Call) -> None:
        """Stop watching a call that has ended."""
        if call.timeout is not None and (calls := self._calls.get(call.timeout)) is not None:
            calls.pop(call, None)

    def _look(self, timeout: float) -> None:
        calls = self._calls[timeout]
        now = time.monotonic()
        while calls:
            call = next(iter(calls))
            # A call that has not started has its full timeout left.
            left = timeout if call.started is None else call.started + timeout - now
            if call.started is None or left > 0:
                self.loop.call_later(left, self._look, timeout)
                return
            del calls[call]
            self._expire(call, call.started + timeout)
        del self._calls[timeout]

    def _expire(self, call: Call, deadline: float) -> None:
        if call.future.done():
            return
        assert call.timeout is not None
        more = (call.patience - 1) * call.timeout
        left = deadline + call.lost_s() + more - time.monotonic()
        if left > 0:
            # While the call waits for a limit, `left` does not shrink: without a minimum, a tiny one would make the
            # loop spin.
            self.loop.call_later(max(left, _SHARING_S if call.shared_s else 0.01), self._expire, call, deadline)
        else:
            # Set with the error: a thread cannot be stopped, and must get no more permits.
            call.abandoned = True
            extended = f", and {more:.3g} s more, since the reward model is full" if more else ""
            call.future.set_exception(TimeoutError(f"{extended}{call.shared or ''}"))


class SharedTime:
    """Measures how long a thread was ready to compute while others held Python's global lock. Create it in the thread.

    With 64 threads that compute, each call takes 64 times as long as alone: its deadline would end it, though it does
    not hang. Time counts as lost only if the thread has computed in it, so a call that waits for a server gets no more
    time.
    """

    __slots__ = ("_all_s", "_at", "_clock", "_own_s", "lost_s", "own_s", "threads")

    def __init__(self) -> None:
        # `measure` runs in other threads, where `time.thread_time` would give their own time.
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._at, self._own_s, self._all_s = time.monotonic(), time.thread_time(), time.process_time()
        self.lost_s = self.own_s = 0.0
        """The seconds that were lost, and those for which the thread computed, until the latest `measure`."""
        self.threads = 0
        """The number of threads of the process, when time was lost last."""

    def measure(self, waited_s: float = 0.0) -> float:
        """Return the seconds that the thread has lost, at most `MAX_SHARED_S`. Called in any thread.

        Args:
            waited_s: the seconds since the latest call of this method for which the thread has waited for limits.
        """
        now, all_s = time.monotonic(), time.process_time()
        try:
            own_s = time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return self.lost_s
        window, own, everything = now - self._at - waited_s, own_s - self._own_s, all_s - self._all_s
        self._at, self._own_s, self._all_s = now, own_s, all_s
        self.own_s += own
        threads = threading.active_count()
        if everything >= _BUSY * window and own >= _OWN_S:
            self.lost_s, self.threads = min(MAX_SHARED_S, self.lost_s + max(0.0, window - own)), threads
        return self.lost_s

    def __str__(self) -> str:
        """Return the end of a message about a deadline; empty if much less time was lost than the thread computed."""
        if self.lost_s < self.own_s:
            return ""
        return (
            f": it computed for {self.own_s:.2g} s, and shared the interpreter with {self.threads - 1} other threads "
            "for the rest. Decorate it with @reward_loop.isolated, or set isolation=process: processes use all cores"
        )


def longest_call_s(options: JobOptions, timeout: float | None) -> float | None:
    """Return how many seconds may pass until the end of some call, while calls are running; ``None`` without a bound.

    A call waits for a thread, or for a place at the reward model, only while another one runs; and for another permit
    no longer than ``max_wait`` of the limit. A slow judge of the run extends deadlines up to `MAX_PATIENCE` times.

    Args:
        options: the options of the job.
        timeout: the deadline of a call in seconds.
    """
    waits = [limit.max_wait for name, limit in options.limits.items() if name != REWARD_MODEL]
    if timeout is None or None in waits:
        return None
    judge = options.limits.get(REWARD_MODEL)
    patience = MAX_PATIENCE if judge is not None and judge.adaptive else 1.0
    return patience * timeout + MAX_SHARED_S + options.retry.max_seconds + max(filter(None, waits), default=0.0)
