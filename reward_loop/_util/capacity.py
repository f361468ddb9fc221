"""`LearnedCapacity`: how many requests a server takes at a time, learned from its refusals. It has no clock."""

from __future__ import annotations

import math

__all__ = ["FULL_STATUS", "LearnedCapacity"]

FULL_STATUS = frozenset({429, 503, 529})
"""HTTP statuses of a full server, unless the answer has a ``Retry-After``."""

ROUNDS = 4
"""More requests are tried after this many times as many answers as there are places. Of a server with `n` places, about
one request in ``2 n`` is then refused."""

FEW_ANSWERS = 2
"""A refusal shows a full server only if fewer answers than this came since the refusal before it. A full server refuses
every further request; a service that refuses 2 % at random, whatever its load is, does so rarely."""


class LearnedCapacity:
    """The number of requests that a server takes at a time.

    It is unlimited until the server refuses requests while it works on others: the number of the others is then the
    number of places. Further requests wait until a place is free. After each `ROUNDS` rounds of answers, one more
    request is tried; if it is not refused, two more, then four more: the server may have been full of others' requests.
    """

    def __init__(self) -> None:
        self.number: float = math.inf
        """The largest number of requests in flight."""
        self.in_flight = 0
        self._most = 0
        """The largest number of requests in flight at a time since there was none."""
        self._step = 1
        self._answers = 0
        """The number of answers since `number` last changed."""
        # Not 0: the first refusal alone may be a random one, so it does not lower the number.
        self._since_refusal = FEW_ANSWERS
        """The number of answers since the last refusal."""

    @property
    def has_free(self) -> bool:
        """Whether the server takes another request."""
        return self.in_flight < self.number

    def begin(self) -> None:
        """Count a request that is being sent."""
        self._most = max(self._most, self.in_flight + 1) if self.in_flight else 1
        self.in_flight += 1

    def end(self, answered: bool) -> None:
        """Count the end of a request, and whether the server answered it, without a refusal or another error."""
        self.in_flight -= 1
        self._since_refusal += answered
        if answered and self.number < math.inf:
            self._answers += 1
            if self._answers >= ROUNDS * self.number:
                self.number += self._step
                self._step *= 2
                self._answers = 0

    def refused(self) -> bool:
        """Learn from a refusal, before the `end` of its request.

        Return whether the server is full: it worked on other requests. If not, it has another reason.
        """
        others = self.in_flight - 1
        # A refusal never raises the number: requests from before it fell may still be in flight.
        if self._since_refusal < FEW_ANSWERS and others < self.number:
            # At least 1: without a request, no answer could show that the server has room again.
            self.number = max(1, others)
            self._answers, self._step = 0, 1
        self._since_refusal = 0
        # Not whether others are in flight now: a busy event loop may have read their answers before this refusal.
        return self._most > 1
