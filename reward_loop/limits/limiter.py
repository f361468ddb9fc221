"""The limits of one service: whose turn it is, and who is in."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import Any

from reward_loop.config import LimitConfig
from reward_loop.errors import LimitError
from reward_loop.limits.adaptive import AdaptiveConcurrency
from reward_loop.limits.window import Charge, SlidingWindow

__all__ = ["PERIOD_S", "Limiter", "Ticket"]

PERIOD_S = 60.0
"""Requests and tokens are counted by the minute."""


class Ticket:
    """One call's place: in the queue, then among those in flight, then nowhere."""

    __slots__ = ("charge", "share", "state", "tokens")

    def __init__(self, tokens: float, share: str) -> None:
        self.tokens = tokens
        self.share = share
        self.state = "waiting"
        self.charge: Charge | None = None

    def admit(self) -> None:
        """The call may begin: from now on it is in flight."""

    def refuse(self, error: LimitError) -> None:
        """The call will never begin, as the limit has been lowered."""


class Limiter:
    """Admits calls to one service, in order, within its limits. It has no clock and does no I/O.

    Callers of different shares (training, validation) have a queue each, and their turns alternate.

    Args:
        name: the service, for messages.
        config: its limits.
        period: seconds over which requests and tokens are counted.
    """

    def __init__(self, name: str, config: LimitConfig, period: float = PERIOD_S) -> None:
        self.name = name
        self._period = period
        self.in_flight = 0
        self._queues: dict[str, deque[Ticket]] = {}
        self._requests: SlidingWindow | None = None
        self._tokens: SlidingWindow | None = None
        self._adaptive: AdaptiveConcurrency | None = None
        self.configure(config)

    def configure(self, config: LimitConfig) -> None:
        """Change the limits; what has been counted stays counted."""
        self.config = config
        self._requests = self._window(self._requests, config.requests_per_minute)
        self._tokens = self._window(self._tokens, config.tokens_per_minute)
        if not config.adaptive:
            self._adaptive = None
        elif self._adaptive is None:
            self._adaptive = AdaptiveConcurrency(config.max_concurrent)
        else:
            self._adaptive.maximum = config.max_concurrent
            if config.max_concurrent is not None:
                self._adaptive.limit = min(self._adaptive.limit, config.max_concurrent)
        for ticket in itertools.chain.from_iterable(self._queues.values()):
            if ticket.state == "waiting" and (error := self._too_large(ticket)) is not None:
                ticket.state = "gone"
                ticket.refuse(error)

    def _too_large(self, ticket: Ticket) -> LimitError | None:
        limit = self.config.tokens_per_minute
        if limit is None or ticket.tokens <= limit:
            return None
        return LimitError(
            f"limit {self.name!r}: a call asks for {ticket.tokens:g} tokens, and tokens_per_minute is {limit}: "
            "raise it, or make smaller calls"
        )

    def _window(self, window: SlidingWindow | None, limit: int | None) -> SlidingWindow:
        # A window without a limit counts on: it may get one later.
        window = window or SlidingWindow(math.inf, self._period)
        window.limit = math.inf if limit is None else limit
        return window

    @property
    def has_queue(self) -> bool:
        """Whether `advance` may have something to do."""
        return bool(self._queues)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(ticket.state == "waiting" for queue in self._queues.values() for ticket in queue)

    @property
    def max_in_flight(self) -> float:
        """How many calls may be in flight now."""
        if self._adaptive is not None:
            return self._adaptive.calls
        return math.inf if self.config.max_concurrent is None else self.config.max_concurrent

    def status(self, now: float) -> dict[str, Any]:
        """The limits, and how far they are used."""
        assert self._requests is not None
        assert self._tokens is not None
        return {
            **self.config.model_dump(),
            "in_flight": self.in_flight,
            "waiting": self.waiting,
            "max_in_flight": None if self.max_in_flight == math.inf else self.max_in_flight,
            "requests_last_minute": self._requests.used(now),
            "tokens_last_minute": self._tokens.used(now),
        }

    def enter(self, now: float, ticket: Ticket) -> None:
        """Admit a call, or queue it until `advance` does.

        Raises:
            LimitError: it asks for more tokens than a whole minute has.
        """
        if (error := self._too_large(ticket)) is not None:
            raise error
        if not self._queues and self._room_at(now, ticket) <= now:
            self._admit(now, ticket)
        else:
            self._queues.setdefault(ticket.share, deque()).append(ticket)

    def advance(self, now: float) -> float | None:
        """Admit whoever may begin now. Return when to look again, if time alone will let someone in."""
        while ticket := self._next():
            at = self._room_at(now, ticket)
            if at > now:
                return None if at == math.inf else at
            # Its share has had its turn: the next is looked for in the others first.
            queue = self._queues.pop(ticket.share)
            queue.popleft()
            if queue:
                self._queues[ticket.share] = queue
            self._admit(now, ticket)
        return None

    def _admit(self, now: float, ticket: Ticket) -> None:
        ticket.state = "in flight"
        self.in_flight += 1
        assert self._requests is not None
        assert self._tokens is not None
        self._requests.count(now, 1)
        if ticket.tokens:
            ticket.charge = self._tokens.add(now, ticket.tokens)
        ticket.admit()

    def _next(self) -> Ticket | None:
        for share, queue in list(self._queues.items()):
            while queue and queue[0].state != "waiting":
                queue.popleft()
            if queue:
                return queue[0]
            del self._queues[share]
        return None

    def _room_at(self, now: float, ticket: Ticket) -> float:
        if self.in_flight >= self.max_in_flight:
            return math.inf  # until one of them leaves
        assert self._requests is not None
        assert self._tokens is not None
        at = max(self._requests.free_at(now, 1), self._tokens.free_at(now, ticket.tokens))
        return at if self._adaptive is None else max(at, self._adaptive.not_before)

    def used(self, now: float, ticket: Ticket, tokens: float) -> None:
        """Correct the estimate of a call by what it really used."""
        assert self._tokens is not None
        if ticket.charge is None:
            ticket.charge = self._tokens.add(now, tokens)
        else:
            self._tokens.correct(now, ticket.charge, tokens)

    def leave(self, now: float, ticket: Ticket, *, refused: bool = False, retry_after: float | None = None) -> None:
        """A call has ended, or will not be made. Afterwards, `advance`.

        Args:
            now: the time.
            ticket: its place.
            refused: the service said that it is too much.
            retry_after: the seconds that it asked for.
        """
        state, ticket.state = ticket.state, "gone"
        if state != "in flight":
            return
        if self._adaptive is not None:
            if refused:
                self._adaptive.refused(now, retry_after)
            else:
                self._adaptive.succeeded(now, self.in_flight)
        self.in_flight -= 1
