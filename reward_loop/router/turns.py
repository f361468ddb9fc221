"""The turns of models that share GPUs, of which one at a time is awake: which one is the next, and when.

`Turns` decides this, from the requests and the time that it is given. The owner of the servers wakes models up and puts
them to sleep.

======= ====================================== =================================================================
State   Requests for the model                 Next state
======= ====================================== =================================================================
ASLEEP  wait                                   AWAKE, when the owner has woken it up
AWAKE   are admitted                           CLOSING, when a request for another has waited `TURN_S` of this turn;
                                               ASLEEP, when it is idle and another model is asked for
CLOSING wait; those in flight end              ASLEEP, when it is idle; AWAKE, if no other model is asked for
======= ====================================== =================================================================

- The next model is the one with the request that has waited longest, so none starves.
- A model is idle when it has had no request in flight for `IDLE_S`, and none that has waited is expected: see
  `Turns.released`.
- A model stays awake until another one is asked for: waking up takes seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

__all__ = ["ALIVE_S", "SILENT_S", "TURN_S", "Turns"]

TURN_S = 120.0
"""Seconds that a request waits, in this turn, before the model that is awake gets no further requests."""

IDLE_S = 0.2
"""Seconds without a request after which a turn may end: a short gap between two requests should not cost a turn."""

ALIVE_S = 10.0
"""Seconds between two spaces that the router sends while it answers a wait for a turn, which may take an hour."""

SILENT_S = 60.0
"""Seconds without a space after which the router counts as frozen."""

EXPECTED_S = 30.0
"""Seconds for which requests are expected that have waited: their clients may have ended meanwhile."""


class Turns:
    """The turns of some models; all times are seconds of one clock.

    Args:
        models: the names of the models. All sleep.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self._waiting: dict[str, dict[object, tuple[float, int]]] = {model: {} for model in models}
        """Model -> what waits for it -> the beginning of the wait, and a number."""
        self._order: dict[str, list[tuple[float, int, object]]] = {model: [] for model in models}
        """Model -> a heap of its waits, also of those that have ended."""
        self._numbers = itertools.count()
        self.awake: str | None = None
        """The model that is awake; ``None`` while the owner puts one to sleep or wakes one up."""
        self._in_flight = 0
        self._woken_at = self._idle_since = 0.0
        self._expected = 0
        self._expected_until = 0.0

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return list(self._waiting)

    def admits(self, model: str, now: float) -> bool:
        """Return whether a request for a model can be sent to its servers now; if so, call `begin` and `end`."""
        return model == self.awake and not self._is_closing(now)

    def begin(self) -> None:
        """Count an admitted request."""
        self._in_flight += 1
        self._expected = max(0, self._expected - 1)

    def end(self, now: float) -> None:
        """Count the end of an admitted request."""
        self._in_flight -= 1
        self._idle_since = now

    def wait(self, model: str, waiter: object, since: float) -> None:
        """Record that a request, for which an object stands, waits for a model until it is `released` or `give_up`.

        Args:
            model: the name of the model.
            waiter: the object.
            since: the beginning of the wait, which may be earlier: the request may have waited at another router.
        """
        number = next(self._numbers)
        self._waiting[model][waiter] = since, number
        heapq.heappush(self._order[model], (since, number, waiter))

    def give_up(self, model: str, waiter: object) -> None:
        """Record that a request no longer waits."""
        self._waiting[model].pop(waiter, None)

    def wake(self, model: str | None, now: float) -> None:
        """Record that the owner has woken a model up, or with ``None`` that none is awake."""
        self.awake = model
        self._expected = 0
        self._woken_at = self._idle_since = now

    def released(self, now: float) -> list[object]:
        """Return the waiting requests of the model that is awake, which wait no longer.

        Each will `begin` soon; some wait at their client, which sends them now. Until then, the model is not idle.
        """
        if self.awake is None or self._is_closing(now):
            return []
        waiting, self._waiting[self.awake] = self._waiting[self.awake], {}
        if waiting:
            self._expected += len(waiting)
            self._expected_until = now + EXPECTED_S
        return list(waiting)

    def next(self, now: float) -> str | None:
        """Return the model that the owner must wake up now instead of the one that is awake; ``None`` for no change."""
        wanted = self._longest_waiting()
        if wanted is None or self.awake is None:
            return wanted
        expects = now < self._idle_since + IDLE_S or (self._expected > 0 and now < self._expected_until)
        return None if self._in_flight or (expects and not self._is_closing(now)) else wanted

    def _longest_waiting(self) -> str | None:
        """Return the model, other than the one that is awake, whose first request has waited longest."""
        wanted = [model for model, waiting in self._waiting.items() if waiting and model != self.awake]
        return min(wanted, key=self._since, default=None)

    def _is_closing(self, now: float) -> bool:
        wanted = self._longest_waiting()
        # From the beginning of the turn: a request that waited before it would end each turn before it admits any.
        return wanted is not None and now >= max(self._since(wanted), self._woken_at) + TURN_S

    def _since(self, model: str) -> float:
        """Return the beginning of the longest wait for a model that is asked for."""
        waiting, order = self._waiting[model], self._order[model]
        while waiting.get(order[0][2]) != order[0][:2]:
            heapq.heappop(order)
        return order[0][0]
