"""Requests for models that share GPUs: they wait until their model is awake, see :mod:`~reward_loop.router.turns`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from reward_loop._util.text import listing
from reward_loop._util.transient import MODEL_ASLEEP
from reward_loop.router.refusals import Refusal
from reward_loop.router.turns import Turns

__all__ = ["TurnQueue"]

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
        while not self._turns.admits(model, time.monotonic()):
            if not wait:
                raise Refusal(503, f"the reward model {model!r} sleeps; {self._awake()}", code=MODEL_ASLEEP)
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
