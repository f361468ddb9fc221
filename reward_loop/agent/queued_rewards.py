"""Scores the rollouts of a `RewardQueue`, and yields complete groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.batch import Batch
from reward_loop.agent.pending import PendingRewards
from reward_loop.agent.queue import QueueEntry, RewardQueue, Staleness
from reward_loop.errors import ConfigError, QueueClosedError, RewardLoopError
from reward_loop.types import Reward

__all__ = ["CompleteSample", "QueuedRewards", "SampleAggregator"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompleteSample(Generic[T]):
    """A group whose members have all arrived."""

    group: Hashable
    members: list[T]
    """In the order of their index in the group."""


class SampleAggregator(Generic[T]):
    """Collects the members of groups, which arrive in any order, and returns each group when it is complete."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[int, T]] = {}

    def __len__(self) -> int:
        """The number of incomplete groups."""
        return len(self._groups)

    @property
    def held(self) -> int:
        """The number of members in incomplete groups."""
        return sum(map(len, self._groups.values()))

    def members(self) -> list[T]:
        """Return the members of incomplete groups."""
        return [item for group in self._groups.values() for item in group.values()]

    def add(self, group: Hashable, group_size: int, member: int, item: T) -> CompleteSample[T] | None:
        """Add a member; return its group if the group is now complete.

        Raises:
            RewardLoopError: the group already has that member.
        """
        members = self._groups.setdefault(group, {})
        if member in members:
            raise RewardLoopError(f"group {group!r} already has member {member}")
        members[member] = item
        if len(members) < group_size:
            return None
        del self._groups[group]
        return CompleteSample(group, [members[i] for i in sorted(members)])


class QueuedRewards:
    """Scores the entries of a `RewardQueue`, and yields the groups whose rewards are all in.

    An async context manager; inside its block, an async iterator that ends when the queue is closed and every group was
    yielded. Scoring continues while nothing iterates.
    """

    def __init__(self, queue: RewardQueue, agent: RewardAgent, *, in_flight: int = 64, max_ready: int | None = None):
        """Connect a queue to an agent.

        Args:
            queue: the rollouts.
            agent: scores them; the caller enters it.
            in_flight: how many samples are scored at a time; the others stay in the queue.
            max_ready: how many complete groups may wait for the trainer; when that many wait, no entry is taken from
                the queue. ``None`` for no limit.

        Raises:
            ConfigError: a limit is below 1, or the manager waits for all samples of a group.
        """
        if in_flight < 1 or (max_ready is not None and max_ready < 1):
            raise ConfigError("in_flight and max_ready: at least 1")
        self._runner = agent._runner
        if self._runner.needs_group:
            raise ConfigError(
                f"{type(agent.manager).__name__} waits for all samples of a group, but a queue delivers them one by "
                "one: submit whole groups to the agent instead"
            )
        self._queue = queue
        self._in_flight = in_flight
        self._max_ready = max_ready
        self._judging: dict[asyncio.Task[None], tuple[QueueEntry, Batch]] = {}
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
        for _, batch in self._judging.values():
            PendingRewards(batch).cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompleteSample[tuple[QueueEntry, Reward]]:
        """Wait for the next complete group; its members are pairs of entry and reward.

        Raises:
            RewardLoopError: an error that must stop the run, or the queue was closed while a group was incomplete.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._pump is not None and self._pump.done() and not self._judging:
                if len(self._aggregator):
                    raise RewardLoopError(
                        f"the queue was closed while {len(self._aggregator)} groups were incomplete; they have "
                        f"{self._aggregator.held} scored samples"
                    )
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        group = self._ready.popleft()
        self._room.set()
        return group

    @property
    def judging(self) -> int:
        """The number of samples that are being scored."""
        return len(self._judging)

    @property
    def ready(self) -> int:
        """The number of complete groups that wait for the trainer."""
        return len(self._ready)

    def staleness(self, current_step: int) -> Staleness:
        """The staleness of everything the trainer has not received: in the queue, in flight, and complete."""
        return Staleness.of(
            self._queue.steps
            + [entry.step for entry, _ in self._judging.values()]
            + [entry.step for entry, _ in self._aggregator.members()]
            + [entry.step for group in self._ready for entry, _ in group.members],
            current_step,
        )

    def metrics(self, current_step: int) -> dict[str, float]:
        """The metrics of the queue, and of everything behind it."""
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
                task = loop.create_task(self._judge(entry, batch := self._submit(entry)))
                self._judging[task] = (entry, batch)
                task.add_done_callback(self._judged)
        except QueueClosedError:
            pass
        except Exception as error:
            self._error = self._error or error
        finally:
            self._changed.set()

    def _submit(self, entry: QueueEntry) -> Batch:
        """Submit one member of a group as a batch; its group is post-processed here when it is complete."""
        self._runner.check_loop()
        batch = self._runner.accept([entry.sample], priority=entry.step)
        batch.post_process = False
        self._runner.start(batch)
        return batch

    async def _judge(self, entry: QueueEntry, batch: Batch) -> None:
        try:
            (reward,) = await PendingRewards(batch)
            complete = self._aggregator.add(entry.group, entry.group_size, entry.member, (entry, reward))
            if complete is not None:
                self._ready.append(await self._post_process(complete))
        except Exception as error:
            self._error = self._error or error

    async def _post_process(
        self, group: CompleteSample[tuple[QueueEntry, Reward]]
    ) -> CompleteSample[tuple[QueueEntry, Reward]]:
        if (process := self._runner.post_processor) is None:
            return group
        entries = [entry for entry, _ in group.members]
        names = [getattr(entry.sample, "uid", None) for entry in entries]
        rewards = await process([reward for _, reward in group.members], names)
        return CompleteSample(group.group, list(zip(entries, rewards, strict=True)))

    def _judged(self, task: asyncio.Task[None]) -> None:
        del self._judging[task]
        self._changed.set()
        self._room.set()
