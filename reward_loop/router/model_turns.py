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

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from reward_loop._util.text import listing
from reward_loop._util.transient import RouterCode
from reward_loop.router.error_answers import Refusal

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
        # Of waits with the same beginning, the heap must not compare the waiters, which have no order.
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
        # A heap cannot remove an entry in its middle: waits that have ended are dropped when they come first.
        while waiting.get(order[0][2]) != order[0][:2]:
            heapq.heappop(order)
        return order[0][0]


_LOOK_S = 0.1
"""Seconds between two looks for a change that comes with time alone."""


class TurnQueue:
    """Admits requests while their model is awake. For one event loop.

    Args:
        models: the names of the models.
        timeout_s: seconds that a request waits.
    """

    def __init__(self, models: Sequence[str], timeout_s: float) -> None:
        self._turns = Turns(models)
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        """Set when another model may have its turn."""

    @property
    def models(self) -> list[str]:
        """The names of the models."""
        return self._turns.models

    @asynccontextmanager
    async def turn(self, model: str, *, wait: bool) -> AsyncIterator[None]:
        """Hold a place at a model that is awake within the block.

        Args:
            model: the name of the model.
            wait: whether to wait here; if not, the client waits with `until_awake`.

        Raises:
            Refusal: 503 if the model sleeps and the request must not wait, or has waited too long.
        """
        # Checked again after the wait: the turn may have ended before this task runs.
        while not self._turns.admits(model, time.monotonic()):
            if not wait:
                raise Refusal(503, f"the reward model {model!r} sleeps; {self._awake()}", code=RouterCode.MODEL_ASLEEP)
            await self._wait(model)
        self._turns.begin()
        try:
            yield
        finally:
            self._turns.end(time.monotonic())
            self._changed.set()

    async def until_awake(self, model: str, waited_s: float = 0.0) -> None:
        """Wait until a model is awake, for a request that its client sends after that.

        Args:
            model: the name of the model.
            waited_s: seconds for which the request has waited before, at this router or at one that was restarted.

        Raises:
            Refusal: 404 if there is no such model; 503 if it did not wake up in time.
        """
        if model not in self.models:
            raise Refusal(404, f"no model {model!r} takes turns, only {listing(self.models)}", param="model")
        if not self._turns.admits(model, time.monotonic()):
            await self._wait(model, waited_s)

    async def next_model(self, awake: str | None) -> str:
        """Wait until another model must wake up, and return its name. Its owner then puts the other one to sleep.

        Args:
            awake: the model that is awake, whose requests are admitted until then; ``None`` if all sleep.
        """
        self._turns.wake(awake, time.monotonic())
        try:
            while True:
                self._release()
                if (model := self._turns.next(time.monotonic())) is not None:
                    return model
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
        finally:
            # Also if the owner's request is cut off: until it asks again, its model may be falling asleep.
            self._turns.wake(None, time.monotonic())

    async def _wait(self, model: str, waited_s: float = 0.0) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns.wait(model, turn, time.monotonic() - waited_s)
        self._changed.set()
        try:
            async with asyncio.timeout(self._timeout_s - waited_s):
                await turn
        except TimeoutError:
            waited = f"the reward model {model!r} did not wake up within {self._timeout_s:g} s"
            raise Refusal(503, f"{waited} (reward_model.server.turn_timeout_s); {self._awake()}") from None
        finally:
            self._turns.give_up(model, turn)
            self._changed.set()

    def _release(self) -> None:
        for turn in self._turns.released(time.monotonic()):
            assert isinstance(turn, asyncio.Future)
            if not turn.done():  # else it was cancelled, and its task has not run since
                turn.set_result(None)

    def _awake(self) -> str:
        return "no other is awake" if self._turns.awake is None else f"{self._turns.awake!r} is awake"
