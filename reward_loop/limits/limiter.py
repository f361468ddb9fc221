"""The limits of one service: a state machine without a clock or I/O. Times are seconds of the caller's clock.

Invariants:

- A call is granted only if the number of calls in flight (`Concurrency`), the `Rate` of requests and the `Rate` of
  tokens all allow it.
- The oldest sample is granted first: by training step, then by the time at which it was submitted. Its retries, and its
  further requests, keep that place.
- A request that has been cancelled or refused stays in the queue until its turn, and is then skipped.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from reward_loop.errors import BudgetSpentError, LimitError
from reward_loop.limits.options import LimitConfig

if TYPE_CHECKING:
    from reward_loop.limits.local import Permit

Order = tuple[float, float]
"""The age of a sample: its training step, and when it was submitted (`time.time`). The oldest gets the next permit."""

PERIOD_S = 60.0
"""Seconds over which requests and tokens are counted."""

MARGIN = 0.01
"""The share by which a period is longer than that of the service. The delay between a grant and the arrival of the
request varies; with the margin, the limit also holds at the service."""

INITIAL = 20
"""The first limit of an adaptive concurrency, as in inspect_ai."""

CUT = 0.8
"""A refusal multiplies the limit by this factor, as in inspect_ai."""

COOL_DOWN_S = 15.0
"""Seconds after a cut during which the limit stays unchanged: calls started before the cut show the same overload."""


class Rate:
    """A rate limit: at most ``limit`` in any window of ``period`` seconds, and at most a burst of them at once.

    The generic cell rate algorithm, with one number of state: the time until which all that was granted is paid for, at
    an even rate. A burst may be granted ahead of it; the rate is lower by the burst, so that both together stay within
    the limit. An amount larger than the burst is granted when all before is paid for.

    Args:
        limit: the limit; ``None`` for none.
        burst_seconds: the burst, as seconds of the limit.
        period: the length of the window in seconds.
        unit: the smallest burst: 1 for requests, 0 for tokens.
    """

    def __init__(self, limit: float | None, burst_seconds: float, period: float, unit: float = 0.0) -> None:
        self._interval_s = 0.0
        """Seconds for which one unit pays; 0 without a limit."""
        self._burst = math.inf
        self._paid_until = -math.inf
        if limit is not None:
            self._burst = max(unit, limit / period * burst_seconds)
            self._interval_s = period * (1 + MARGIN) / (limit - self._burst + unit)

    def free_at(self, amount: float) -> float:
        """Return the time from which ``amount`` is allowed."""
        if not self._interval_s:
            return -math.inf
        # A microsecond earlier: the sum of many intervals may be off by less.
        return self._paid_until - max(0.0, self._burst - amount) * self._interval_s - 1e-6

    def add(self, now: float, amount: float) -> float:
        """Count a granted amount; return the time until which it is not paid for, for `correct`."""
        self._paid_until = max(self._paid_until, now) + amount * self._interval_s
        return self._paid_until

    def correct(self, now: float, unpaid_until: float, change: float) -> None:
        """Add ``change`` to an amount that was counted, at most as far down as it is not paid for yet."""
        self._paid_until = max(self._paid_until, now) + max(change * self._interval_s, min(0.0, now - unpaid_until))


class Concurrency:
    """The largest number of calls in flight: fixed, or adapted to the responses of the service, up to the maximum.

    An adaptive limit doubles once per *round*, which is as many answers as the limit, until the first refusal. Each
    refusal (HTTP 429, or 503 with ``Retry-After``) then cuts it by a fifth, at most once in `COOL_DOWN_S` seconds, and
    each round adds one call. Timeouts, broken connections and other errors do not change it.
    """

    def __init__(self, maximum: int | None, adaptive: bool) -> None:
        self._maximum = math.inf if maximum is None else maximum
        self._is_adaptive = adaptive
        self.limit = min(INITIAL, self._maximum) if adaptive else self._maximum
        self.not_before = -math.inf
        """No call is granted before this time, by the service's ``Retry-After``."""
        self._was_refused = False
        self._answers = 0
        self._cool_until = -math.inf

    def answered(self, now: float, in_flight: int) -> None:
        """Record an answer of the service, with the number of calls in flight, including this one."""
        # With less than half of the limit in flight, an answer does not show that the service can handle more.
        if not self._is_adaptive or now < self._cool_until or in_flight < self.limit // 2:
            return
        self._answers += 1
        if self._answers >= self.limit:
            self._answers = 0
            self.limit = min(self.limit + 1 if self._was_refused else 2 * self.limit, self._maximum)

    def refused(self, now: float, retry_after: float | None) -> None:
        """Record a refusal of the service, with its ``Retry-After`` in seconds."""
        if not self._is_adaptive:
            return
        self.not_before = max(self.not_before, now + (retry_after or 0.0))
        if now >= self._cool_until:
            self.limit = max(1, int(min(self.limit, self._maximum) * CUT))
            self._was_refused, self._answers = True, 0
            self._cool_until = max(now + COOL_DOWN_S, self.not_before)


class Waiting(NamedTuple):
    """A request for a permit, ordered by the age of its sample."""

    order: Order
    number: int
    """Which request of equally old ones comes first."""
    permit: Permit
    """What the request gets when it is granted."""
    request: asyncio.Future[Permit]


class Limiter:
    """Grants permits for calls to one service; requests and tokens are counted over ``period`` seconds."""

    def __init__(self, name: str, config: LimitConfig, period: float = PERIOD_S) -> None:
        self.name = name
        self.config = config
        self.in_flight = 0
        self.concurrency = Concurrency(config.shared(config.max_concurrent), config.adaptive)
        self._requests = Rate(config.shared(config.requests_per_minute), config.burst_seconds, period, unit=1.0)
        self._tokens_limit = config.shared(config.tokens_per_minute)
        self._tokens = Rate(self._tokens_limit, config.burst_seconds, period)
        self.queue: list[Waiting] = []
        """The calls that wait, and cancelled ones that `advance` removes."""
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return sum(not waiting.request.done() for waiting in self.queue)

    def enter(self, now: float, order: Order, permit: Permit, request: asyncio.Future[Permit]) -> None:
        """Grant a request, or queue it until `advance` grants it.

        Raises:
            LimitError: the call needs more tokens than ``tokens_per_minute``.
        """
        if self._tokens_limit is not None and permit.tokens > self._tokens_limit:
            raise LimitError(
                f"limit {self.name!r}: a call with {permit.tokens:g} tokens exceeds "
                f"tokens_per_minute={self._tokens_limit:g}: raise the limit, or make smaller calls"
            )
        # Only with an empty queue: a small new call must not overtake a large one that waits for tokens.
        if not self.queue and self._free_at(permit) <= now:
            self._grant(now, permit, request)
        else:
            heapq.heappush(self.queue, Waiting(order, next(self._numbers), permit, request))

    def advance(self, now: float) -> float | None:
        """Grant all requests that are possible now.

        Return the time of the next one, or ``None`` if none waits or it depends on the end of another call.
        """
        while self.queue:
            waiting = self.queue[0]
            if not waiting.request.done():
                at = self._free_at(waiting.permit)
                # The next call waits, and all others behind it: a large call would otherwise wait for ever.
                if at > now:
                    return None if at == math.inf else at
                self._grant(now, waiting.permit, waiting.request)
            heapq.heappop(self.queue)
        return None

    def refuse_waiting(self, why: str) -> None:
        """Refuse all waiting requests, since the budget is used up."""
        queue, self.queue = self.queue, []
        for waiting in queue:
            if not waiting.request.done():
                waiting.request.set_exception(BudgetSpentError(why))

    def _grant(self, now: float, permit: Permit, request: asyncio.Future[Permit]) -> None:
        self.in_flight += 1
        # Counted at the grant and never returned: the service counts a request even if it fails or is cancelled.
        self._requests.add(now, 1.0)
        if self._tokens_limit is not None:
            permit.unpaid_until = self._tokens.add(now, permit.tokens)
        request.set_result(permit)

    def _free_at(self, permit: Permit) -> float:
        if self.in_flight + 1 > self.concurrency.limit:
            return math.inf  # until a call ends
        at = max(self._requests.free_at(1.0), self.concurrency.not_before)
        return at if self._tokens_limit is None else max(at, self._tokens.free_at(permit.tokens))

    def used(self, now: float, permit: Permit, tokens: float) -> None:
        """Replace a call's token estimate with its actual usage. Call `advance` afterwards."""
        self._tokens.correct(now, permit.unpaid_until, tokens - permit.tokens)
        permit.tokens = tokens

    def leave(self, now: float, accepted: bool | None = None, retry_after: float | None = None) -> None:
        """End a call, with the arguments of `Permit.leave`. Call `advance` afterwards."""
        if accepted and self.config.adaptive:
            self.concurrency.answered(now, self.in_flight)
        elif accepted is False:
            self.concurrency.refused(now, retry_after)
        # After the adaptive limit, for which this call is still in flight.
        self.in_flight -= 1
