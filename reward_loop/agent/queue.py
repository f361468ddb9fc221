"""A bounded queue between generation and judging, and `QueuedRewards`, which scores its rollouts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from reward_loop._util.bounded_tasks import BoundedTasks
from reward_loop.agent.agent import close_manager, failure_of, with_group
from reward_loop.errors import ConfigError, QueueClosedError, RewardLoopError
from reward_loop.managers.base import recorded_uid
from reward_loop.managers.post_process import PostProcess
from reward_loop.managers.scorer import reward_of
from reward_loop.types import Reward


@dataclass(frozen=True, slots=True, eq=False)  # two entries may have equal fields
class QueueEntry:
    """A rollout that waits to be judged; see `RewardQueue.put` for the fields."""

    sample: Any
    group: Hashable
    group_size: int
    member: int
    step: int
    queued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Staleness:
    """How many training steps entries are behind the current weights."""

    max: int = 0
    mean: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[int], current_step: int) -> Staleness:
        """The staleness of entries that were generated in these steps."""
        ages = [max(0, current_step - step) for step in steps]
        return cls(max(ages), sum(ages) / len(ages)) if ages else cls()


class RewardQueue:
    """A bounded first-in, first-out queue: `put` waits while the queue is full, and nothing is dropped.

    It belongs to one event loop.

    A producer can reserve places before it generates: `reserve`, then `put_reserved`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity: at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: deque[QueueEntry] = deque()
        # The holder of the lock is first in line; an asyncio.Lock wakes its waiters in order.
        self._first_putter, self._room = asyncio.Lock(), asyncio.Event()
        self._first_getter, self._filled = asyncio.Lock(), asyncio.Event()
        self._reserved = 0
        self._waiting_producers = 0
        self._closed = False
        self._put = 0
        self._got = 0
        self._most = 0
        self._producer_wait_s = 0.0
        self._wait_until = time.monotonic()
        self.changed: Callable[[], None] = lambda: None
        """Called when an entry was added, and when the queue was closed."""

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"RewardQueue({len(self)} of {self.capacity}, {'closed' if self._closed else 'open'})"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def steps(self) -> list[int]:
        """The step of each entry."""
        return [entry.step for entry in self._entries]

    async def put(
        self, sample: Any, *, step: int, group: Hashable = None, group_size: int = 1, member: int = 0
    ) -> None:
        """Add a rollout; wait while the queue is full.

        Args:
            sample: `RewardSample`, or a row of verl's ``DataProto``.
            step: the training step whose weights generated it.
            group: the group of the rollout; without one it is a group of its own.
            group_size: the number of members of that group.
            member: the index of the rollout in its group, from 0.

        Raises:
            QueueClosedError: the queue was closed. The sample was not added.
        """
        _check_member(member, group_size)
        await self.reserve()
        self.put_reserved(sample, step=step, group=group, group_size=group_size, member=member)

    async def reserve(self, count: int = 1) -> None:
        """Wait until ``count`` places are free, and reserve them.

        A request for more places than the capacity is granted when the queue is empty.

        Raises:
            QueueClosedError: the queue was closed. No place is reserved.
        """
        self._count_wait(+1)
        try:
            async with self._first_putter:
                # An empty queue grants any request: one for more places than the capacity would otherwise never end.
                while self._taken and self._taken + count > self.capacity and not self._closed:
                    # No `await` between the check and `wait`, so no wake-up is lost.
                    self._room.clear()
                    await self._room.wait()
                if self._closed:
                    raise QueueClosedError("the queue is closed")
                self._reserved += count
        finally:
            self._count_wait(-1)

    def put_reserved(
        self, sample: Any, *, step: int, group: Hashable = None, group_size: int = 1, member: int = 0
    ) -> QueueEntry:
        """Add a rollout to a reserved place, without waiting; return its entry. See `put` for the arguments.

        Raises:
            QueueClosedError: the queue was closed. The place is no longer reserved.
            RewardLoopError: no place is reserved.
        """
        _check_member(member, group_size)
        if not self._reserved:
            raise RewardLoopError("put_reserved: no place is reserved; call reserve first")
        self.release()
        if self._closed:
            raise QueueClosedError("the queue is closed")
        # A random name: entries without a group must not become members of one group, nor have equal names in records.
        entry = QueueEntry(sample, secrets.token_hex(8) if group is None else group, group_size, member, step)
        self._entries.append(entry)
        self._put += 1
        self._most = max(self._most, len(self._entries))
        self._filled.set()
        self.changed()
        return entry

    def release(self, count: int = 1) -> None:
        """Release reserved places that will not be used."""
        self._reserved -= count
        self._room.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Remove an entry that is still in the queue, because its producer was cancelled."""
        if entry not in self._entries:
            raise RewardLoopError("withdraw: the entry is not in the queue")
        self._entries.remove(entry)
        self._room.set()

    @property
    def _taken(self) -> int:
        return len(self._entries) + self._reserved

    def _count_wait(self, producers: int) -> None:
        """Add the producers' waiting time until now; then change the number of waiting producers."""
        now = time.monotonic()
        self._producer_wait_s += self._waiting_producers * (now - self._wait_until)
        self._wait_until = now
        self._waiting_producers += producers

    async def get(self) -> QueueEntry:
        """Remove and return the oldest entry; wait while the queue is empty.

        Raises:
            QueueClosedError: the queue is closed and empty.
        """
        async with self._first_getter:
            while (entry := self.get_nowait()) is None:
                if self._closed:
                    raise QueueClosedError("the queue is closed and empty")
                self._filled.clear()
                await self._filled.wait()
            return entry

    def get_nowait(self) -> QueueEntry | None:
        """Remove and return the oldest entry; ``None`` if the queue is empty."""
        if not self._entries:
            return None
        self._got += 1
        self._room.set()
        return self._entries.popleft()

    async def __aiter__(self) -> AsyncIterator[QueueEntry]:
        with suppress(QueueClosedError):
            while True:
                yield await self.get()

    def close(self) -> None:
        """Refuse new entries. Entries in the queue can still be taken."""
        self._closed = True
        self._room.set()
        self._filled.set()
        self.changed()

    def staleness(self, current_step: int) -> Staleness:
        """The staleness of the entries in the queue."""
        return Staleness.of(self.steps, current_step)

    def start_step(self) -> None:
        """Begin a training step: reset the counts, the largest size and the waiting time in `metrics`."""
        self._count_wait(0)
        self._put = self._got = 0
        self._producer_wait_s = 0.0
        self._most = len(self)

    def metrics(self, current_step: int, taken: Iterable[QueueEntry] | None = None) -> dict[str, float]:
        """Metrics since the last `start_step`.

        Args:
            current_step: the step of the current weights.
            taken: the entries that were taken, and whose rewards are not in use yet. With them, the metrics contain the
                staleness of all entries, and not only of those in the queue.
        """
        self._count_wait(0)
        staleness = self.staleness(current_step)
        now = time.monotonic()
        metrics: dict[str, float] = {
            "reward_queue/size": len(self),
            "reward_queue/reserved": self._reserved,
            "reward_queue/largest_size": self._most,
            "reward_queue/capacity": self.capacity,
            "reward_queue/waiting_producers": self._waiting_producers,
            "reward_queue/producer_wait_s": self._producer_wait_s,
            "reward_queue/oldest_s": now - self._entries[0].queued_at if self._entries else 0.0,
            "reward_queue/put": self._put,
            "reward_queue/got": self._got,
            "reward_queue/staleness_max": staleness.max,
            "reward_queue/staleness_mean": staleness.mean,
        }
        if taken is not None:
            everything = Staleness.of([*self.steps, *(entry.step for entry in taken)], current_step)
            metrics["reward_queue/all_staleness_max"] = everything.max
            metrics["reward_queue/all_staleness_mean"] = everything.mean
        return metrics


def _check_member(member: int, group_size: int) -> None:
    if not 0 <= member < group_size:
        raise ConfigError(f"member must be from 0 to {group_size - 1} in a group of {group_size}, got {member}")


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A group whose members all have a reward."""

    group: Hashable
    members: list[tuple[QueueEntry, Reward]]
    """In the order of their index in the group."""


class QueuedRewards:
    """Scores the entries of a `RewardQueue`, and yields the groups whose rewards are all in.

    An async context manager; inside its block, an async iterator that ends when the queue is closed and every group was
    yielded. Scoring continues while nothing iterates. Leaving the block closes the manager.
    """

    def __init__(self, queue: RewardQueue, manager: Any, *, in_flight: int = 64, max_ready: int | None = None):
        """Connect a queue to a reward manager.

        Args:
            queue: the rollouts.
            manager: a reward manager; its ``run_single`` is awaited once per rollout.
            in_flight: how many samples are scored at a time; the others stay in the queue.
            max_ready: how many complete groups may wait for the trainer; when that many wait, no entry is taken from
                the queue. ``None`` for no limit.

        Raises:
            ConfigError: a limit is below 1, or the manager waits for all samples of a group.
        """
        if in_flight < 1 or (max_ready is not None and max_ready < 1):
            raise ConfigError("in_flight and max_ready: at least 1")
        if getattr(manager, "needs_group", False):
            raise ConfigError(
                f"{type(manager).__name__} waits for all samples of a group, but a queue delivers them one by "
                "one: submit whole groups to a RewardAgent instead"
            )
        self._queue = queue
        self._manager = manager
        self._post_process = PostProcess.of(manager)
        self._max_ready = max_ready
        self._name = secrets.token_hex(4)
        """Part of the names of groups: several runs may record samples in one folder."""
        self._judging = BoundedTasks(self._start_one, self._judged, in_flight)
        self._taken: set[QueueEntry] = set()
        """The entries that are in flight, or whose group the trainer has not received."""
        self._incomplete: dict[Hashable, dict[int, tuple[QueueEntry, Reward]]] = {}
        """Group -> the members that have a reward, by their index in the group."""
        self._ready: deque[CompleteGroup] = deque()
        self._changed = asyncio.Event()
        self._error: RewardLoopError | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._queue.changed = self._queue_changed
        self._judging.fill()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        # First: the end of each cancelled task would start another one.
        self._is_closed, self._queue.changed = True, lambda: None
        await close_manager(self._manager, self._judging)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompleteGroup:
        """Wait for the next complete group; its members are pairs of entry and reward.

        Raises:
            RewardLoopError: an error that must stop the run, or the queue was closed while a group was incomplete.
        """
        while not self._ready:
            if self._error is not None:
                # Only after the complete groups: their rewards are not lost by the error.
                raise self._error
            if self._queue.closed and not (self._queue or self._judging.tasks):
                if self._incomplete:
                    raise RewardLoopError(
                        f"the queue was closed while {len(self._incomplete)} groups were incomplete; they have "
                        f"{sum(map(len, self._incomplete.values()))} scored samples"
                    )
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        group = self._ready.popleft()
        self._taken.difference_update(entry for entry, _ in group.members)
        self._judging.fill()
        return group

    @property
    def judging(self) -> int:
        """The number of samples that are being scored."""
        return len(self._judging.tasks)

    @property
    def ready(self) -> int:
        """The number of complete groups that wait for the trainer."""
        return len(self._ready)

    def staleness(self, current_step: int) -> Staleness:
        """Return the staleness of everything the trainer has not received: in the queue, in flight, and complete."""
        return Staleness.of([*self._queue.steps, *(entry.step for entry in self._taken)], current_step)

    def metrics(self, current_step: int) -> dict[str, float]:
        """Return the metrics of the queue, and of everything behind it."""
        return {
            **self._queue.metrics(current_step, self._taken),
            "reward_queue/judging": self.judging,
            "reward_queue/incomplete_groups": len(self._incomplete),
            "reward_queue/ready_groups": self.ready,
        }

    def _queue_changed(self) -> None:
        self._judging.fill()
        self._changed.set()

    def _start_one(self) -> asyncio.Task[None] | None:
        is_full = self._max_ready is not None and len(self._ready) >= self._max_ready
        entry = None if is_full or self._is_closed else self._queue.get_nowait()
        if entry is None:
            return None
        self._taken.add(entry)
        return asyncio.create_task(self._judge(entry))

    async def _judge(self, entry: QueueEntry) -> None:
        """Score one member of a group; if it is the last one, post-process the group."""
        sample = self._row(entry)
        reward = await reward_of(self._manager, sample, f"group {entry.group}, member {entry.member}")
        members = self._incomplete.setdefault(entry.group, {})
        if entry.member in members:
            raise RewardLoopError(f"group {entry.group!r} already has member {entry.member}")
        members[entry.member] = (entry, reward)
        if len(members) < entry.group_size:
            return
        del self._incomplete[entry.group]
        entries, rewards = zip(*(members[i] for i in sorted(members)), strict=True)
        if self._post_process is not None:
            uids = [recorded_uid(self._row(entry)) for entry in entries]
            rewards = await self._post_process(rewards, uids)
        self._ready.append(CompleteGroup(entry.group, list(zip(entries, rewards, strict=True))))

    def _row(self, entry: QueueEntry) -> Any:
        """The sample as the manager receives it."""
        return with_group(entry.sample, f"{self._name}.{entry.group}", entry.member, entry.group_size)

    def _judged(self, task: asyncio.Task[None]) -> None:
        self._error = self._error or failure_of(task, self._manager)
        self._changed.set()
