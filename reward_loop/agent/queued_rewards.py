"""`QueuedRewards`: scores the rollouts of a `RewardQueue`, and yields complete groups."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from reward_loop._util.bounded_tasks import BoundedTasks
from reward_loop.agent.agent import close_manager, failure_of
from reward_loop.agent.queue import QueueEntry, RewardQueue, Staleness
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.post_process import PostProcess
from reward_loop.managers.scorer import reward_of
from reward_loop.types import Reward, RewardSample

__all__ = ["CompleteGroup", "QueuedRewards"]


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        sample = entry.sample
        if isinstance(sample, RewardSample) and sample.group is None:
            # Records then show the members of a group together.
            sample = replace(sample, group=f"{self._name}.{entry.group}", group_size=entry.group_size)
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
            uids = [getattr(entry.sample, "uid", None) for entry in entries]
            rewards = await self._post_process(rewards, uids)
        self._ready.append(CompleteGroup(entry.group, list(zip(entries, rewards, strict=True))))

    def _judged(self, task: asyncio.Task[None]) -> None:
        self._error = self._error or failure_of(task, self._manager)
        self._changed.set()
