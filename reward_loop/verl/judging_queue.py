"""Where rollouts wait for judges in verl's mode ``separate_async``. Plain objects: no verl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from reward_loop.agent.queue import QueueEntry, RewardQueue, Staleness

__all__ = ["JudgingQueue", "Places", "merge_metrics"]

_LARGEST = {f"reward_queue/{name}" for name in ("oldest_s", "staleness_max", "all_staleness_max")}
_MEANS = {
    "reward_queue/staleness_mean": ("reward_queue/size",),
    "reward_queue/all_staleness_mean": ("reward_queue/size", "reward_queue/judging"),
}
"""Metric -> those that say over how many rollouts it is a mean."""


class Places:
    """Room in the queue for the rollouts of a prompt, kept from before they are generated."""

    def __init__(self, count: int) -> None:
        self.left = count
        """How many have not been used."""
        self.judged = False
        """Whether a rollout of the prompt was given to a judge."""


class JudgingQueue:
    """A `RewardQueue` whose room is taken before a rollout is generated, and out of which a number is judged at a time.

    Args:
        capacity: how many rollouts may be generated and wait, all together.
        in_flight: how many are judged at a time; ``None`` for any number.
    """

    def __init__(self, capacity: int, in_flight: int | None) -> None:
        self.queue = RewardQueue(capacity)
        self._turns: AbstractAsyncContextManager[Any] = nullcontext()
        if in_flight is not None:
            self._turns = asyncio.Semaphore(in_flight)
        self._judging: set[QueueEntry] = set()

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[Places]:
        """Waits until a prompt's rollouts have room; what is not used of it is given back at the end."""
        await self.queue.reserve(count)
        places = Places(count)
        try:
            yield places
        finally:
            self.queue.release(places.left)
            places.left = 0

    @asynccontextmanager
    async def turn(self, places: Places, *, step: int) -> AsyncIterator[None]:
        """Puts a rollout into its place, and waits until it is to be judged; it is being judged inside the block.

        Args:
            places: those of its prompt.
            step: the version of the weights that generated it.
        """
        places.left -= 1
        entry = self.queue.put_reserved(object(), step=step)
        taken = False
        try:
            # Both serve in order, so that everybody takes the entry that is their own.
            async with self._turns:
                await self.queue.get()
                taken = True
                self._judging.add(entry)
                try:
                    yield
                finally:
                    self._judging.discard(entry)
        finally:
            if not taken:
                self.queue.withdraw(entry)

    def metrics(self, current_step: int, updates_per_step: int = 1) -> dict[str, float]:
        """Metrics for a logger: of the queue, and of all rollouts that have no reward yet.

        Args:
            current_step: the version of the current weights.
            updates_per_step: how many updates lie between two versions of the weights. Staleness counts updates.
        """
        everything = Staleness.of([*self.queue.steps, *(entry.step for entry in self._judging)], current_step)
        queue = self.queue.metrics(current_step)
        del queue["reward_queue/paused"]  # this queue is never paused
        for name in ("reward_queue/staleness_max", "reward_queue/staleness_mean"):
            queue[name] *= updates_per_step
        return {
            **queue,
            "reward_queue/judging": len(self._judging),
            "reward_queue/all_staleness_max": everything.max * updates_per_step,
            "reward_queue/all_staleness_mean": everything.mean * updates_per_step,
        }


def merge_metrics(queues: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several queues as those of one. ``largest_size`` becomes a bound: the sum of what was largest in
    each, though not at the same time."""
    merged = {}
    for name in queues[0]:
        values = [metrics[name] for metrics in queues]
        if name in _LARGEST:
            merged[name] = max(values)
        elif name in _MEANS:
            counts = [sum(metrics[of] for of in _MEANS[name]) for metrics in queues]
            total = sum(counts)
            merged[name] = sum(v * c for v, c in zip(values, counts, strict=True)) / total if total else 0.0
        else:
            merged[name] = sum(values)
    return merged
