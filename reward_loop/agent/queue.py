"""`RewardQueue`: the bounded queue between generation and judging.

A rollout's way, in one event loop:

1. `reserve` waits until the queue has room for a prompt's rollouts: a full queue pauses generation.
2. A generated rollout waits in `judging` for a place among those that are judged at the same time, the oldest first.
3. Within `judging` it is judged, and its place in the queue is free again.

Nothing is dropped: a rollout leaves the queue to be judged, or because its producer was cancelled.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from reward_loop.errors import ConfigError


class _Room:
    """Places that are granted in the order of the requests. A request for all places or more needs an empty room."""

    def __init__(self, places: int | None) -> None:
        self._places = places
        self._taken = 0
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    async def take(self, count: int) -> None:
        async with self._turn:  # locks are acquired in order
            while self._places is not None and self._taken and self._taken + count > self._places:
                self._freed.clear()
                await self._freed.wait()
            self._taken += count

    def free(self, count: int) -> None:
        self._taken -= count
        self._freed.set()


@dataclass
class QueueCounts:
    """What happened in a queue since the counts were last taken, and what is in it now."""

    capacity: int
    produced: int = 0
    consumed: int = 0
    size_max: int = 0
    wait_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    """The seconds of each judged rollout."""
    queued: Counter[int] = field(default_factory=Counter)
    """The number of rollouts of each step that wait for a judge."""
    judged: Counter[int] = field(default_factory=Counter)
    """The number of rollouts of each step that are being judged."""


def queue_metrics(counts: Iterable[QueueCounts], current_step: int, updates_per_step: int = 1) -> dict[str, float]:
    """Return the metrics of one queue, or of the queues of several processes together.

    ``size_max`` of several queues is an upper bound: their largest sizes may occur at different times.

    Args:
        counts: the counts of each queue.
        current_step: the step of the current weights.
        updates_per_step: the number of updates in a step. Staleness counts updates.
    """
    found = list(counts)
    steps = [step for one in found for step in (one.queued + one.judged).elements()]
    staleness = [max(0, current_step - step) * updates_per_step for step in steps] or [0]
    metrics = {
        "reward_queue/capacity": sum(one.capacity for one in found),
        "reward_queue/size": sum(one.queued.total() for one in found),
        "reward_queue/size_max": sum(one.size_max for one in found),
        "reward_queue/in_flight": sum(one.judged.total() for one in found),
        "reward_queue/produced": sum(one.produced for one in found),
        "reward_queue/consumed": sum(one.consumed for one in found),
        "reward_queue/dropped": 0,
        "reward_queue/wait_s": sum(one.wait_s for one in found),
        "reward_queue/staleness_max": max(staleness),
        "reward_queue/staleness_mean": statistics.fmean(staleness),
    }
    if seconds := sorted(second for one in found for second in one.compute_s):
        metrics["reward_compute/mean_s"] = statistics.fmean(seconds)
        metrics["reward_compute/max_s"] = seconds[-1]
        metrics["reward_compute/p95_s"] = seconds[int(0.95 * (len(seconds) - 1))]
    return metrics


class RewardQueue:
    """A bounded queue between generation and judging, for one event loop.

    Example::

        queue = RewardQueue(capacity=256, in_flight=64)

        async def rollout(prompt):
            async with queue.reserve(4) as places:  # pauses generation while the queue is full
                samples = await generate(prompt, 4)
                async with places.judging(step=step, count=4):
                    return await agent.submit(samples, group_size=4)

    Args:
        capacity: the largest number of rollouts that are being generated or wait for a judge.
        in_flight: the largest number of rollouts that are judged at the same time; ``None`` for no bound.

    Raises:
        ConfigError: a bound is below 1.
    """

    def __init__(self, capacity: int = 1024, in_flight: int | None = None) -> None:
        if capacity < 1 or (in_flight is not None and in_flight < 1):
            raise ConfigError(f"capacity and in_flight: at least 1; got {capacity} and {in_flight}")
        self.capacity = capacity
        """The largest number of rollouts that are being generated or wait for a judge."""
        self._queue, self._judges = _Room(capacity), _Room(in_flight)
        self._counts = QueueCounts(capacity)

    @asynccontextmanager
    async def reserve(self, count: int = 1) -> AsyncIterator[Places]:
        """Wait until the queue has room for some rollouts, and keep it for them until they are judged.

        More rollouts than the capacity are admitted when the queue is empty.
        """
        began = time.monotonic()
        await self._queue.take(count)
        self._counts.wait_s += time.monotonic() - began
        places = Places(self, count)
        try:
            yield places
        finally:
            self._queue.free(places.left)

    def take_counts(self) -> QueueCounts:
        """Return the counts since the last call, for `queue_metrics`."""
        taken = self._counts
        size = taken.queued.total()
        self._counts = QueueCounts(self.capacity, size_max=size, queued=+taken.queued, judged=+taken.judged)
        return taken

    def metrics(self, current_step: int) -> dict[str, float]:
        """Return the metrics since the last call; see `queue_metrics`."""
        return queue_metrics([self.take_counts()], current_step)


class Places:
    """The places in a queue of some rollouts that are generated together."""

    def __init__(self, queue: RewardQueue, count: int) -> None:
        self._queue = queue
        self.left = count
        """The number of rollouts that are not judged yet."""

    @asynccontextmanager
    async def judging(self, *, step: int, count: int = 1) -> AsyncIterator[Callable[[], None]]:
        """Wait until generated rollouts may be judged, and free their places in the queue. Judge them in the block.

        The context is a function that ends it early: the rollouts are judged, and wait for others of their group.

        Args:
            step: the training step whose weights generated them.
            count: their number.
        """
        queue = self._queue
        queue._counts.produced += count
        queue._counts.queued[step] += count
        queue._counts.size_max = max(queue._counts.size_max, queue._counts.queued.total())
        try:
            await queue._judges.take(count)
        finally:
            queue._counts.queued[step] -= count
        self.left -= count
        queue._queue.free(count)
        queue._counts.consumed += count
        queue._counts.judged[step] += count
        began = time.monotonic()

        def end() -> None:
            queue._judges.free(count)
            queue._counts.judged[step] -= count
            queue._counts.compute_s += [time.monotonic() - began] * count

        with ExitStack() as stack:
            stack.callback(end)
            yield stack.close
