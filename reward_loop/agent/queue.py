"""A bounded queue between generation and judging, and what puts groups together behind it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import PendingRewards
from reward_loop.errors import ConfigError, QueueClosedError, RewardLoopError
from reward_loop.types import Reward

__all__ = [
    "CompleteSample",
    "QueueEntry",
    "QueuedRewards",
    "RewardQueue",
    "SampleAggregator",
    "Staleness",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A rollout that waits to be judged."""

    sample: Any
    group: Hashable
    """Which group it belongs to."""
    group_size: int
    """How many members that group has."""
    member: int
    """Which of them it is, from 0."""
    step: int
    """The training step whose weights generated it."""
    queued_at: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class Staleness:
    """By how many training steps entries are older than the current weights."""

    max: int = 0
    mean: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[int], current_step: int) -> Staleness:
        """That of entries which were generated in these steps."""
        ages = [max(0, current_step - step) for step in steps]
        return cls(max(ages), sum(ages) / len(ages)) if ages else cls()


class RewardQueue:
    """First in, first out, and bounded: `put` waits while it is full, and nothing is ever dropped.

    It belongs to one event loop. While it is paused, `get` waits, and `put` goes on until the queue is full.

    A producer that would rather not begin what will have no room asks for it before: `reserve`, then `put_reserved`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity: at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: deque[QueueEntry] = deque()
        # Whoever holds the lock is first in line; the lock serves in order.
        self._first_putter, self._room = asyncio.Lock(), asyncio.Event()
        self._first_getter, self._filled = asyncio.Lock(), asyncio.Event()
        self._reserved = 0
        self._waiting_producers = 0
        self._paused = False
        self._closed = False
        self._put = 0
        self._got = 0
        self._most = 0
        self._producer_wait_s = 0.0
        self._wait_until = time.monotonic()

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "paused" if self._paused else "open"
        return f"RewardQueue({len(self)} of {self.capacity}, {state})"

    @property
    def paused(self) -> bool:
        """Whether `get` waits even though there are entries."""
        return self._paused

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
            sample: what the manager takes.
            step: the training step whose weights generated it.
            group: which group it belongs to; without one it is a group of its own.
            group_size: how many members that group has.
            member: which of them it is.

        Raises:
            QueueClosedError: the queue was closed. The sample has not been taken.
        """
        _check_member(member, group_size)
        await self.reserve()
        self.put_reserved(sample, step=step, group=group, group_size=group_size, member=member)

    async def reserve(self, count: int = 1) -> None:
        """Wait until there are so many free places, and keep them free.

        Who asks for more places than the queue has gets them when nothing else is in it.

        Raises:
            QueueClosedError: the queue was closed. No place is reserved.
        """
        self._count_wait(+1)
        try:
            async with self._first_putter:
                while self._taken and self._taken + count > self.capacity and not self._closed:
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
        """Add a rollout in a place that was reserved; as `put`, without waiting. Returns its entry.

        Raises:
            QueueClosedError: the queue was closed. The place is no longer reserved.
        """
        _check_member(member, group_size)
        if not self._reserved:
            raise RewardLoopError("put_reserved: no place is reserved; call reserve before")
        self.release()
        if self._closed:
            raise QueueClosedError("the queue is closed")
        entry = QueueEntry(sample, object() if group is None else group, group_size, member, step)
        self._entries.append(entry)
        self._put += 1
        self._most = max(self._most, len(self._entries))
        self._filled.set()
        return entry

    def release(self, count: int = 1) -> None:
        """Give back places that were reserved, and that nothing will be put in."""
        self._reserved -= count
        self._room.set()

    def withdraw(self, entry: QueueEntry) -> None:
        """Take an entry back that nobody has taken, because its producer gave up."""
        kept = [other for other in self._entries if other is not entry]
        if len(kept) == len(self._entries):
            raise RewardLoopError("withdraw: the entry is not in the queue")
        self._entries = deque(kept)
        self._room.set()

    @property
    def _taken(self) -> int:
        return len(self._entries) + self._reserved

    def _count_wait(self, producers: int) -> None:
        """Adds up the seconds until now, and then so many producers to those who wait."""
        now = time.monotonic()
        self._producer_wait_s += self._waiting_producers * (now - self._wait_until)
        self._wait_until = now
        self._waiting_producers += producers

    async def get(self) -> QueueEntry:
        """Take the oldest entry; wait while there is none, or while the queue is paused.

        Raises:
            QueueClosedError: it is closed and empty.
        """
        async with self._first_getter:
            while not self._entries or self._paused:
                if self._closed and not self._entries:
                    raise QueueClosedError("the queue is closed and empty")
                self._filled.clear()
                await self._filled.wait()
            self._got += 1
            entry = self._entries.popleft()
        self._room.set()
        return entry

    async def __aiter__(self) -> AsyncIterator[QueueEntry]:
        with suppress(QueueClosedError):
            while True:
                yield await self.get()

    def pause(self) -> None:
        """Hand nothing on, until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Hand entries on again."""
        self._paused = False
        self._filled.set()

    def close(self) -> None:
        """Take nothing more. What is in the queue can still be taken."""
        self._closed = True
        self._room.set()
        self._filled.set()

    def staleness(self, current_step: int) -> Staleness:
        """How old the waiting entries are."""
        return Staleness.of(self.steps, current_step)

    def start_step(self) -> None:
        """A training step begins: the largest size, what was put and got, and waits are counted from here."""
        self._count_wait(0)
        self._put = self._got = 0
        self._producer_wait_s = 0.0
        self._most = len(self)

    def metrics(self, current_step: int) -> dict[str, float]:
        """Figures for a logger, since the last `start_step`."""
        self._count_wait(0)
        staleness = self.staleness(current_step)
        now = time.monotonic()
        return {
            "reward_queue/size": len(self),
            "reward_queue/reserved": self._reserved,
            "reward_queue/largest_size": self._most,
            "reward_queue/capacity": self.capacity,
            "reward_queue/waiting_producers": self._waiting_producers,
            "reward_queue/producer_wait_s": self._producer_wait_s,
            "reward_queue/oldest_s": now - self._entries[0].queued_at if self._entries else 0.0,
            "reward_queue/put": self._put,
            "reward_queue/got": self._got,
            "reward_queue/paused": float(self._paused),
            "reward_queue/staleness_max": staleness.max,
            "reward_queue/staleness_mean": staleness.mean,
        }


@dataclass(frozen=True, slots=True)
class CompleteSample(Generic[T]):
    """A group whose members have all arrived."""

    group: Hashable
    members: list[T]
    """In the order of their places in the group."""


class SampleAggregator(Generic[T]):
    """Collects the members of groups, which arrive in any order, and hands on the groups that are complete."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[int, T]] = {}

    def __len__(self) -> int:
        """How many groups are begun and not complete."""
        return len(self._groups)

    @property
    def held(self) -> int:
        """How many members wait for the rest of their group."""
        return sum(map(len, self._groups.values()))

    def members(self) -> list[T]:
        """Return the members that wait."""
        return [item for group in self._groups.values() for item in group.values()]

    def add(self, group: Hashable, group_size: int, member: int, item: T) -> CompleteSample[T] | None:
        """Take a member; return its group if that is complete now.

        Raises:
            RewardLoopError: the group has that member already.
        """
        members = self._groups.setdefault(group, {})
        if member in members:
            raise RewardLoopError(f"group {group!r} has its member {member} already")
        members[member] = item
        if len(members) < group_size:
            return None
        del self._groups[group]
        return CompleteSample(group, [members[i] for i in sorted(members)])


class QueuedRewards:
    """Judges what comes through a `RewardQueue`, and yields the groups whose rewards are all in.

    An async context manager, and inside its block an async iterator that ends when the queue is closed and everything
    in it has been handed on. Judging goes on while nobody iterates.
    """

    def __init__(self, queue: RewardQueue, agent: RewardAgent, *, in_flight: int = 64, max_ready: int | None = None):
        """Connect them.

        Args:
            queue: where the rollouts come from.
            agent: what judges them; entered by the caller.
            in_flight: how many samples are judged at a time; the others wait in the queue.
            max_ready: how many complete groups may wait for the trainer before nothing more is taken out of the queue;
                ``None`` for any number.

        Raises:
            ConfigError: a bound is below 1, or the manager waits for all samples of a group.
        """
        if in_flight < 1 or (max_ready is not None and max_ready < 1):
            raise ConfigError("in_flight and max_ready: at least 1")
        if agent._needs_group:
            raise ConfigError(
                f"{type(agent.manager).__name__} waits for all samples of a group, and a queue hands them on one by "
                "one: submit whole groups to the agent"
            )
        self._queue = queue
        self._agent = agent
        self._in_flight = in_flight
        self._max_ready = max_ready
        self._judging: dict[asyncio.Task[None], tuple[QueueEntry, PendingRewards]] = {}
        self._aggregator: SampleAggregator[tuple[QueueEntry, Reward]] = SampleAggregator()
        self._ready: deque[CompleteSample[tuple[QueueEntry, Reward]]] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._pump = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for task in (self._pump, *self._judging) if task is not None]
        for _, pending in self._judging.values():
            pending.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompleteSample[tuple[QueueEntry, Reward]]:
        """Wait for the next complete group; its members are pairs of entry and reward.

        Raises:
            RewardLoopError: an error that must stop the run, or the queue was closed in the middle of a group.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._pump is not None and self._pump.done() and not self._judging:
                if len(self._aggregator):
                    raise RewardLoopError(
                        f"the queue was closed while {len(self._aggregator)} groups were incomplete; they hold "
                        f"{self._aggregator.held} judged samples"
                    )
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        group = self._ready.popleft()
        self._room.set()
        return group

    @property
    def judging(self) -> int:
        """How many samples are being judged."""
        return len(self._judging)

    @property
    def ready(self) -> int:
        """How many complete groups wait for the trainer."""
        return len(self._ready)

    def staleness(self, current_step: int) -> Staleness:
        """How old everything is that the trainer has not got yet: in the queue, in judging, and behind it."""
        return Staleness.of(
            self._queue.steps
            + [entry.step for entry, _ in self._judging.values()]
            + [entry.step for entry, _ in self._aggregator.members()]
            + [entry.step for group in self._ready for entry, _ in group.members],
            current_step,
        )

    def metrics(self, current_step: int) -> dict[str, float]:
        """Figures for a logger: the queue's, and those of what comes after it."""
        staleness = self.staleness(current_step)
        return {
            **self._queue.metrics(current_step),
            "reward_queue/judging": self.judging,
            "reward_queue/incomplete_groups": len(self._aggregator),
            "reward_queue/ready_groups": self.ready,
            "reward_queue/all_staleness_max": staleness.max,
            "reward_queue/all_staleness_mean": staleness.mean,
        }

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                while len(self._judging) >= self._in_flight or (
                    self._max_ready is not None and len(self._ready) >= self._max_ready
                ):
                    self._room.clear()
                    await self._room.wait()
                entry = await self._queue.get()
                pending = self._agent._submit_member(entry.sample, entry.step)
                task = loop.create_task(self._judge(entry, pending))
                self._judging[task] = (entry, pending)
                task.add_done_callback(self._judged)
        except QueueClosedError:
            pass
        except Exception as error:
            self._error = self._error or error
        finally:
            self._changed.set()

    async def _judge(self, entry: QueueEntry, pending: PendingRewards) -> None:
        try:
            (reward,) = await pending
            complete = self._aggregator.add(entry.group, entry.group_size, entry.member, (entry, reward))
            if complete is not None:
                self._ready.append(await self._post_process(complete))
        except Exception as error:
            self._error = self._error or error

    async def _post_process(
        self, group: CompleteSample[tuple[QueueEntry, Reward]]
    ) -> CompleteSample[tuple[QueueEntry, Reward]]:
        if (process := self._agent._post_processor) is None:
            return group
        entries = [entry for entry, _ in group.members]
        names = [getattr(entry.sample, "uid", None) for entry in entries]
        rewards = await process([reward for _, reward in group.members], names)
        return CompleteSample(group.group, list(zip(entries, rewards, strict=True)))

    def _judged(self, task: asyncio.Task[None]) -> None:
        del self._judging[task]
        self._changed.set()
        self._room.set()


def _check_member(member: int, group_size: int) -> None:
    if not 0 <= member < group_size:
        raise ConfigError(f"member {member} of a group of {group_size}: members are counted from 0")
