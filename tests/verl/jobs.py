"""The job's actor without Ray: its methods are called in this process, as by a handle."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from reward_loop.verl.run.job import Job


class Handle:
    """The handle of a `Job`. Its next calls can get lost: before they arrive, or their replies.

    Args:
        job: the actor.
        lost: for each of the next calls of `send`, ``""``, ``"call"`` or ``"reply"``.
    """

    def __init__(self, job: Job, lost: tuple[str, ...] = ()) -> None:
        self.calls: Counter[str] = Counter()
        self._job = job
        self._lost = list(lost)
        self._is_dead = asyncio.Event()
        self._death: Exception = ActorDiedError()

    def die(self, death: Exception | None = None) -> None:
        """Fail all calls, those in flight too, as if the actor had died."""
        self._death = death or self._death
        self._is_dead.set()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(self._call(method, arguments)))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls[method] += 1
        lost = self._lost.pop(0) if method == "send" and self._lost else ""
        if lost == "call":
            raise ActorUnavailableError("connection refused", None)
        call, death = (asyncio.ensure_future(one) for one in (getattr(self._job, method)(*arguments), self._died()))
        try:
            await asyncio.wait([call, death], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._death
            if lost == "reply":
                raise ActorUnavailableError("connection reset", None)
            return call.result()
        finally:
            call.cancel()
            death.cancel()

    async def _died(self) -> None:
        await self._is_dead.wait()
