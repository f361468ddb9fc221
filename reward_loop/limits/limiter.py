"""The limits of one service: a state machine without a clock or I/O. Times are seconds of the caller's clock.

Invariants:

- A call is granted only if the number of calls in flight (fixed, or set by `AdaptiveConcurrency`), the `Rate` of
  requests and the `Rate` of tokens all allow it.
- Calls of a traffic class are granted in order; traffic classes take turns.
- A request that has been cancelled or refused stays in its queue until its turn, and is then skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from typing import Any, NamedTuple

from reward_loop.errors import BudgetSpentError, LimitError
from reward_loop.limits.options import LimitConfig
from reward_loop.limits.permit import MAX_PATIENCE, REWARD_MODEL, Permit

logger = logging.getLogger(__name__)

PERIOD_S = 60.0
"""Seconds over which requests and tokens are counted."""

MARGIN, MARGIN_S = 0.01, 0.25
"""A charge counts longer than the period: by this share of the period, but at least by ``MARGIN_S`` seconds. The delay
between a grant and the arrival of the request varies; with the margin, the limit also holds at the service. For a
period of one minute it costs 1 % of the rate."""

GRAINS = 64
"""Time steps per second. Calls within one step share one charge, which keeps the log small at thousands of calls per
second. A power of two, so that times are exact floats."""

INITIAL = 20
"""Initial limit of adaptive concurrency, as in inspect_ai."""

FIRST = 2
"""Initial limit of `reward_model`, and the limit while the judge answers nothing: with few calls, a judge is fastest.
Not 1, since a call that hangs must not stop all others."""

SLOW_START = 2.0
"""Growth factor of the limit per round until the first refusal, as in TCP slow start (RFC 5681)."""

FAST_START = 8.0
"""The largest growth factor per round, if calls use little of their deadlines: with the usual 300 s, a judge then has
500 calls in flight after three rounds."""

FULL = 0.5
"""The limit stops growing when a call uses more than this share of its deadline, if the last growth was the cause. In a
queue, the latency is at most proportional to the calls in flight, so a limit of twice the size still meets it."""

UNAFFECTED = 1.5
"""The last growth was not the cause if the slowest call takes at most this many times as long as before it: twice the
calls then had a third more throughput. So a judge that thinks for long, but has free places, gets more calls."""

PATIENCE = 4.0
"""A call hangs only if it takes this many times as long as the slowest of the latest answered calls. A growth of the
limit doubles the latency at most; the rest is for a judge that becomes slower, because others use its machine."""

SILENCE = 3
"""After this number of deadlines that pass without any answer in between, the limit starts again at `FIRST`."""

GROWTH = 1.05
"""Growth factor of the limit per round after the first refusal, at least by one call; as in inspect_ai."""

CUT = 0.8
"""A refusal multiplies the limit by this factor, as in inspect_ai."""

COOL_DOWN_S = 15.0
"""Seconds after a cut during which the limit stays unchanged: calls started before the cut show the same overload."""

WINDOW = 100
"""The number of responses whose refusals are counted."""

BACKGROUND = 0.02
"""The share of calls that a service may refuse without being overloaded, until a larger one is known."""

MAX_BACKGROUND = 0.2
"""The largest background: more refusals are overload, even if a cut does not lower their share."""

UNCHANGED = 0.75
"""A cut has not lowered the share of refusals if it is at least this part of the share before. A service at its
capacity refuses none after a cut, or if it was far above its capacity, at most half of the share."""


class Charge:
    """The amount charged for the calls within one time step."""

    __slots__ = ("amount", "time")

    def __init__(self, time: float, amount: float) -> None:
        self.time = time
        self.amount = amount


class Rate:
    """A rate limit: at most ``limit`` in any window of ``period`` seconds, and at most ``burst`` at once.

    Combines two bounds. A token bucket paces the calls; a call larger than the bucket starts when the bucket is full,
    and later calls wait until the debt is refilled. A bucket alone would allow ``limit + burst`` in a window, so a
    sliding-window log of charges enforces the limit. ``unit`` is the minimum burst: 1 for requests, 0 for tokens.
    """

    def __init__(self, period: float, unit: float = 0.0) -> None:
        self.limit = self.burst = math.inf
        self._period = period
        self._lifetime = period + max(period * MARGIN, MARGIN_S)
        self._unit = unit
        self._charges: deque[Charge] = deque()
        self._total = 0.0
        self._level = math.inf
        self._filled_at = 0.0

    def configure(self, limit: float | None, burst_seconds: float) -> None:
        """Change the limit, with the bucket size as seconds of its rate; earlier charges and debts remain."""
        self.limit = math.inf if limit is None else limit
        self.burst = max(self._unit, self.limit / self._period * burst_seconds)
        self._level = min(self._level, self.burst) if limit is not None else math.inf

    def free_at(self, now: float, amount: float) -> float:
        """Return the time when ``amount`` is allowed: ``now``, later, or infinity if it is above the limit."""
        if self.limit == math.inf:
            return now
        self._settle(now)
        return max(self._window_free_at(now, amount), self._bucket_free_at(now, amount))

    def used(self, now: float) -> float:
        """Return the sum of the charges in the window ending at ``now``."""
        self._settle(now)
        return self._total

    def add(self, now: float, amount: float) -> Charge:
        """Add ``amount`` to the charge of the current time step; return the charge, which `change` can change."""
        # Rounded up: a charge may end late, but never before its period is over.
        time = math.ceil(now * GRAINS) / GRAINS
        if not self._charges or self._charges[-1].time < time:
            self._charges.append(Charge(time, 0.0))
        self.change(now, self._charges[-1], amount)
        return self._charges[-1]

    def change(self, now: float, charge: Charge, amount: float) -> None:
        """Add ``amount``, which may be negative, to a charge, if it is still in the window."""
        # Also without a limit: it may get one later, and nothing else would delete its old charges.
        self._settle(now)
        # The charge is no longer part of `_total`: a correction would be counted for ever.
        if now >= charge.time + self._lifetime:
            return
        charge.amount += amount
        self._total += amount
        self._level = min(self.burst, self._level - amount)

    def _settle(self, now: float) -> None:
        """Delete the charges before the window, and refill the bucket."""
        charges = self._charges
        while charges and charges[0].time + self._lifetime <= now:
            self._total -= charges.popleft().amount
        if not charges:
            self._total = 0.0  # discard rounding errors
        if now > self._filled_at:
            if self.limit < math.inf:
                filled = (now - self._filled_at) * self.limit / self._period
                self._level = min(self.burst, self._level + filled)
            self._filled_at = now

    def _bucket_free_at(self, now: float, amount: float) -> float:
        # A call larger than the bucket waits for a full bucket only, and leaves a debt; otherwise it could never start.
        missing = min(amount, self.burst) - self._level
        # A tolerance, because the refilled level has rounding errors.
        return now if missing <= 1e-9 * self.burst else now + missing * self._period / self.limit

    def _window_free_at(self, now: float, amount: float) -> float:
        excess = self._total + amount - self.limit
        if excess <= 0:
            return now
        if amount > self.limit:
            return math.inf
        for charge in self._charges:
            excess -= charge.amount
            if excess <= 0:
                return charge.time + self._lifetime
        return now


class AdaptiveConcurrency:
    """An adaptive limit on calls in flight, controlled by the service's responses.

    Answers raise the limit: once per *round*, which is as many answers as the current limit. Refusals (HTTP 429) cut
    it, if there are more of them than at a low load. Timeouts, broken connections and other errors do not change it.

    Some services refuse a share of the calls whatever the load is. Refusals count as overload only if the latest
    `WINDOW` responses have clearly more than this *background*: the share that the service still refuses after a cut.
    If a cut does not lower the share, it is undone.

    For the run's own judge, the limit also follows the latency, as *shares*: the part of its deadline that a call has
    used. The limit starts at `FIRST`, and grows while the slowest call of the round shows free places: see `FULL` and
    `UNAFFECTED`. It does not shrink if calls become slower: a judge that thinks for long would lose throughput.
    Instead, `patience` gives the calls more time.
    """

    def __init__(self, maximum: int | None = None, initial: int = INITIAL) -> None:
        self.limit = float(initial)
        self.not_before = 0.0
        """No call is granted before this time, by the service's ``Retry-After``."""
        self.background = BACKGROUND
        """The share of refusals that does not depend on the load."""
        self._latest: deque[bool] = deque(maxlen=WINDOW)
        """For each of the latest responses, whether it is a refusal."""
        self._ignored = 0
        """The number of next responses that belong to calls from before the last cut."""
        self._cut: tuple[float, float] | None = None
        """The share of refusals, and the limit, before the last cut; ``None`` if that cut has lowered the share."""
        self._slow_start = True
        self._answers = 0
        self._cool_down_until = 0.0
        self._slowest = self._slowest_before = 0.0
        """The largest share of the latest answers, at most twice as many as the limit: of the newer and the older
        half."""
        self._newer = 0
        self._at_growth = math.inf
        """The largest share before the last growth; infinity before the first one."""
        self._expired = 0
        """The number of deadlines that have passed since the last answer."""
        self.bound(maximum)

    def bound(self, maximum: int | None) -> None:
        """Set the maximum of the limit; ``None`` for no maximum."""
        self._maximum = math.inf if maximum is None else maximum
        self.limit = min(self.limit, self._maximum)

    @property
    def calls(self) -> int:
        """The limit as a whole number of calls, at least 1."""
        return max(1, int(self.limit))

    @property
    def patience(self) -> float:
        """How many times its deadline a call may take, from 1 to `MAX_PATIENCE`."""
        return min(max(1.0, PATIENCE * max(self._slowest, self._slowest_before)), MAX_PATIENCE)

    @property
    def refused_share(self) -> float:
        """The share of refusals in the latest responses."""
        return sum(self._latest) / len(self._latest) if self._latest else 0.0

    def answered(self, now: float, in_flight: int, share: float = 0.0) -> None:
        """Record an answer of the service.

        Args:
            now: the time.
            in_flight: the number of calls in flight, including this one.
            share: the part of its deadline that the call has used; 0 if that is unknown.
        """
        self._count(False)
        self._expired = 0
        self._newer += 1
        if self._newer > self.calls:
            self._newer, self._slowest_before, self._slowest = 1, self._slowest, 0.0
        self._slowest = max(self._slowest, share)
        if self._cut is not None and len(self._latest) == WINDOW:
            if self._is_overloaded():
                self._latest.clear()  # an overload that has just ended must not count for the background
            else:
                self._cut = None
                self.background = min(max(self.refused_share, BACKGROUND), MAX_BACKGROUND)
        # With less than half of the limit in flight, an answer does not show that the service can handle more.
        if now < self._cool_down_until or in_flight < self.calls // 2:
            return
        self._answers += 1
        if self._answers < self.calls:
            return
        self._answers = 0
        slowest = self._slowest
        if slowest > max(FULL, UNAFFECTED * self._at_growth):
            return
        self._at_growth = slowest
        start = min(max(SLOW_START, FULL / slowest), FAST_START) if slowest else SLOW_START
        grown = self.limit * start if self._slow_start else max(self.limit * GROWTH, self.limit + 1)
        self.limit = min(grown, self._maximum)

    def expired(self) -> None:
        """Record that a deadline has passed without an answer."""
        self._expired += 1
        if self._expired >= SILENCE:
            self.limit, self._slow_start, self._answers = float(FIRST), True, 0
            self._slowest, self._slowest_before, self._at_growth = 0.0, 0.0, math.inf

    def refused(self, now: float, in_flight: int, retry_after: float | None = None) -> None:
        """Record a refusal of the service (HTTP 429), with its ``Retry-After`` in seconds."""
        self._count(True)
        if not self._is_overloaded():
            return
        share = self.refused_share
        if self._cut is not None and self._cut[0] * UNCHANGED <= share <= MAX_BACKGROUND:
            self.background, self.limit = share, self._cut[1]
            self._cut = None
            self._latest.clear()
            # The refusals did not show the capacity: it is unknown again, so the limit may grow fast.
            self._slow_start, self._cool_down_until = True, now
            return
        if retry_after is not None:
            self.not_before = max(self.not_before, now + retry_after)
        if now < self._cool_down_until:
            return
        self._cut = (share, self.limit)
        # The limit is known to be near the capacity now, so it grows slowly from here on.
        self._slow_start = False
        self._answers = 0
        self._latest.clear()
        # These calls started under the old limit; their refusals must not cut the new one.
        self._ignored = in_flight
        self.limit = max(1.0, self.limit * CUT)
        self._cool_down_until = max(now + COOL_DOWN_S, self.not_before)

    def _count(self, is_refusal: bool) -> None:
        if self._ignored:
            self._ignored -= 1
        else:
            self._latest.append(is_refusal)

    def _is_overloaded(self) -> bool:
        """Return whether the latest responses have more refusals than chance explains: four standard deviations."""
        # For a full window, also while it fills: a few refusals among the first responses are not overload.
        expected = self.background * WINDOW
        return sum(self._latest) > expected + 4 * math.sqrt(expected)


class Waiting(NamedTuple):
    """A request for a permit."""

    permit: Permit
    """What the request gets when it is granted."""
    traffic_class: str
    request: asyncio.Future[Permit]


class Limiter:
    """Grants permits for calls to one service; requests and tokens are counted over ``period`` seconds."""

    def __init__(self, name: str, config: LimitConfig, period: float = PERIOD_S) -> None:
        self.name = name
        self.in_flight = 0
        self._queues: dict[str, deque[Waiting]] = {}
        self._requests = Rate(period, unit=1.0)
        self._tokens = Rate(period)
        self._adaptive: AdaptiveConcurrency | None = None
        self._background_is_logged = False
        self.configure(config)

    def configure(self, config: LimitConfig) -> None:
        """Change the limits. Earlier calls still count; waiting calls that can never be granted are refused."""
        self.config = config
        self._requests.configure(config.requests_per_minute, config.burst_seconds)
        self._tokens.configure(config.tokens_per_minute, config.burst_seconds)
        if not config.adaptive:
            self._adaptive = None
        elif self._adaptive is None:
            initial = FIRST if self.name == REWARD_MODEL else INITIAL
            self._adaptive = AdaptiveConcurrency(config.max_concurrent, initial)
        else:
            self._adaptive.bound(config.max_concurrent)
        for waiting in list(itertools.chain.from_iterable(self._queues.values())):
            if not waiting.request.done() and (error := self._too_large(waiting.permit)) is not None:
                waiting.request.set_exception(error)

    def _too_large(self, permit: Permit) -> LimitError | None:
        limit = self.config.tokens_per_minute
        if limit is None or permit.tokens <= limit:
            return None
        return LimitError(
            f"limit {self.name!r}: a call with {permit.tokens:g} tokens exceeds tokens_per_minute={limit}: raise the "
            "limit, or make smaller calls"
        )

    @property
    def has_queue(self) -> bool:
        """Whether calls may be waiting, so that `advance` is needed."""
        return bool(self._queues)

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return sum(not waiting.request.done() for queue in self._queues.values() for waiting in queue)

    @property
    def patience(self) -> float:
        """See `AdaptiveConcurrency`; 1 for a fixed limit."""
        return 1.0 if self._adaptive is None else self._adaptive.patience

    @property
    def max_in_flight(self) -> float:
        """The current limit on calls in flight; infinity if there is none."""
        if self._adaptive is not None:
            return self._adaptive.calls
        return math.inf if self.config.max_concurrent is None else self.config.max_concurrent

    def status(self, now: float) -> dict[str, Any]:
        """Return the limits and their current usage."""
        return {
            **self.config.model_dump(),
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "max_in_flight": None if self.max_in_flight == math.inf else self.max_in_flight,
            "requests_last_minute": self._requests.used(now),
            "tokens_last_minute": self._tokens.used(now),
        }

    def enter(self, now: float, waiting: Waiting) -> None:
        """Grant a request, or queue it until `advance` grants it.

        Raises:
            LimitError: the call needs more tokens than ``tokens_per_minute``.
        """
        if (error := self._too_large(waiting.permit)) is not None:
            raise error
        # Only with empty queues: a small new call must not overtake a large one that waits for tokens.
        if not self._queues and self._free_at(now, waiting) <= now:
            self._grant(now, waiting)
        else:
            self._queues.setdefault(waiting.traffic_class, deque()).append(waiting)

    def advance(self, now: float) -> float | None:
        """Grant all requests that are possible now.

        Return the time of the next one, or ``None`` if none waits or it depends on the end of another call.
        """
        while waiting := self._next():
            at = self._free_at(now, waiting)
            # The next call waits, and all others behind it: a large call would otherwise wait for ever.
            if at > now:
                return None if at == math.inf else at
            # Round robin: this traffic class goes last.
            queue = self._queues.pop(waiting.traffic_class)
            queue.popleft()
            if queue:
                self._queues[waiting.traffic_class] = queue
            self._grant(now, waiting)
        return None

    def refuse_waiting(self, why: str) -> None:
        """Refuse all waiting requests, since the budget is used up."""
        queues, self._queues = self._queues, {}
        for waiting in itertools.chain.from_iterable(queues.values()):
            if not waiting.request.done():
                waiting.request.set_exception(BudgetSpentError(why))

    def _grant(self, now: float, waiting: Waiting) -> None:
        permit = waiting.permit
        self.in_flight += 1
        # Charged at the grant and never returned: the service counts a request even if it fails or is cancelled.
        self._requests.add(now, 1)
        if permit.tokens:
            permit.charge = self._tokens.add(now, permit.tokens)
        waiting.request.set_result(permit)

    def _next(self) -> Waiting | None:
        for traffic_class, queue in list(self._queues.items()):
            while queue and queue[0].request.done():
                queue.popleft()
            if queue:
                return queue[0]
            del self._queues[traffic_class]
        return None

    def _free_at(self, now: float, waiting: Waiting) -> float:
        if self.in_flight + 1 > self.max_in_flight:
            return math.inf  # until a call ends
        at = max(self._requests.free_at(now, 1.0), self._tokens.free_at(now, waiting.permit.tokens))
        return at if self._adaptive is None else max(at, self._adaptive.not_before)

    def used(self, now: float, permit: Permit, tokens: float) -> None:
        """Replace a call's token estimate with its actual usage. Call `advance` afterwards."""
        if permit.charge is None:
            permit.charge = self._tokens.add(now, tokens)
        else:
            self._tokens.change(now, permit.charge, tokens - permit.tokens)
        permit.tokens = tokens

    def leave(
        self, now: float, accepted: bool | None = None, retry_after: float | None = None, share: float = 0.0
    ) -> None:
        """End a call, with the arguments of `Permit.leave` and `Permit.share`. Call `advance` afterwards."""
        if self._adaptive is not None:
            if accepted:
                self._adaptive.answered(now, self.in_flight, share)
            elif accepted is None and share >= 1:
                # A cancelled call, or a broken connection, says nothing about the speed of the judge.
                self._adaptive.expired()
            elif accepted is False:
                self._adaptive.refused(now, self.in_flight, retry_after)
            if self._adaptive.background > BACKGROUND and not self._background_is_logged:
                self._background_is_logged = True
                logger.warning(
                    "limit %r: %.0f %% of the calls are refused (HTTP 429), also with fewer calls in flight: the limit "
                    "is not lowered because of them",
                    self.name,
                    100 * self._adaptive.background,
                )
        # After the adaptive limit, for which this call is still in flight.
        self.in_flight -= 1
