"""The rewards of a submitted batch, as a future that completes group by group."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.types import Reward

__all__ = ["Group", "MiniBatch", "PendingRewards"]


@dataclass(frozen=True, slots=True)
class Group:
    """A group whose members have all ended."""

    index: int
    """Which of the batch's groups it is."""
    indices: range
    """The places of its samples in the batch."""
    rewards: list[Reward]
    """The members' rewards, in order of submission."""

    @property
    def scores(self) -> list[float]:
        """The members' ``reward_score``."""
        return [reward["reward_score"] for reward in self.rewards]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Some complete groups of one batch, in the order in which they were completed."""

    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def indices(self) -> list[int]:
        """The places of all its samples in the batch, group by group."""
        return [i for group in self.groups for i in group.indices]

    @property
    def rewards(self) -> list[Reward]:
        """The rewards of all its samples, beside `indices`."""
        return [reward for group in self.groups for reward in group.rewards]


class PendingRewards:
    """What `RewardAgent.submit` returns: the batch's rewards, as they come.

    It can be awaited, which gives all rewards in order of submission, and iterated over, which gives each `Group` when
    it is complete. Both can be done more than once, and by several tasks; each iteration begins with the first group.
    Giving up an ``await`` does not give up the batch: `cancel` does.

    An error that must stop the run (the policy ``raise``, too many failures, a bug in the manager) is raised from
    there, and ends the batch: its other samples are cancelled.
    """

    __slots__ = (
        "_error",
        "_latencies",
        "_left",
        "_next",
        "_observed",
        "_on_cancel",
        "_on_delivered",
        "_order",
        "_post_processed",
        "_rewards",
        "_samples",
        "_starts",
        "_tasks",
        "_times",
        "_waiters",
        "number",
        "priority",
        "tag",
    )

    def __init__(
        self,
        samples: list[Any],
        sizes: Sequence[int],
        *,
        number: int,
        priority: float,
        tag: Any,
        on_cancel: Callable[[PendingRewards], None],
        on_delivered: Callable[[PendingRewards], None],
    ) -> None:
        if any(size < 1 for size in sizes) or sum(sizes) != len(samples):
            raise ConfigError(
                f"groups of {sum(sizes)} samples were named, and {len(samples)} samples given; no group may be empty"
            )
        self.number = number
        """Counts the agent's batches, in order of submission."""
        self.priority = priority
        self.tag = tag
        """What the caller gave to `RewardAgent.submit` to know the batch by."""
        self._samples = samples
        self._rewards: list[Reward | None] = [None] * len(samples)
        self._starts = list(accumulate(sizes, initial=0))
        self._left = array("l", sizes)
        self._order: list[int] = []
        self._post_processed = True
        """Whether its groups are; not where somebody else puts them together."""
        self._latencies: array[float] | None = None
        self._times: array[float] | None = None
        self._next = 0
        self._error: RewardLoopError | None = None
        self._observed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._on_cancel = on_cancel
        self._on_delivered = on_delivered

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "pending"
        tag = "" if self.tag is None else f", tag={self.tag!r}"
        return f"PendingRewards({state}, {len(self._order)} of {self.group_count} groups{tag})"

    def __len__(self) -> int:
        """How many samples it has."""
        return len(self._rewards)

    @property
    def group_count(self) -> int:
        """How many groups it has."""
        return len(self._left)

    @property
    def completed(self) -> int:
        """How many of them are complete."""
        return len(self._order)

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended it."""
        return self._error is not None or len(self._order) == len(self._left)

    def cancel(self) -> None:
        """Cancel the samples that have not ended. Whoever waits gets a `RewardsCancelledError`."""
        self._on_cancel(self)

    def __await__(self) -> Generator[Any, None, list[Reward]]:
        return self._all().__await__()

    def __aiter__(self) -> AsyncIterator[Group]:
        return self.groups()

    async def wait(self, groups: int) -> int:
        """Wait until so many groups are complete, or all; return how many are."""
        while len(self._order) < min(groups, self.group_count):
            await self._change()
        self._check()
        return len(self._order)

    def complete_groups(self, first: int = 0, last: int | None = None) -> list[Group]:
        """Return the groups that are complete, in order of completion, from the ``first``-th to before the ``last``."""
        return [self._group(index) for index in self._order[first:last]]

    async def groups(self) -> AsyncIterator[Group]:
        """Yield the groups as they complete."""
        yielded = 0
        try:
            while yielded < self.group_count:
                await self.wait(yielded + 1)
                yielded += 1
                yield self._group(self._order[yielded - 1])
        finally:
            if yielded == self.group_count:
                self._on_delivered(self)

    async def mini_batches(self, groups: int) -> AsyncIterator[MiniBatch]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch has at least one group, not {groups}")
        yielded = 0
        try:
            while yielded < self.group_count:
                await self.wait(yielded + groups)
                chosen = self._order[yielded : yielded + groups]
                yielded += len(chosen)
                yield MiniBatch(tuple(self._group(index) for index in chosen))
        finally:
            if yielded == self.group_count:
                self._on_delivered(self)

    async def _all(self) -> list[Reward]:
        await self.wait(self.group_count)
        self._on_delivered(self)
        return [reward for reward in self._rewards if reward is not None]

    def _group(self, index: int) -> Group:
        members = self._members(index)
        return Group(index, members, [reward for reward in self._rewards[members.start : members.stop] if reward])

    def _members(self, index: int) -> range:
        return range(self._starts[index], self._starts[index + 1])

    def _group_of(self, sample: int) -> int:
        return bisect_right(self._starts, sample) - 1

    def _check(self) -> None:
        if self._error is not None:
            self._observed = True
            self._on_delivered(self)
            raise self._error

    async def _change(self) -> None:
        self._check()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # What follows is called by the agent.

    def _take(self) -> int | None:
        """The next sample to start, or None if all are started."""
        while self._next < len(self._rewards):
            self._next += 1
            if self._rewards[self._next - 1] is None:
                return self._next - 1
        return None

    def _ended(self, sample: int, reward: Reward) -> int | None:
        """Book a sample's reward; return its group if that has no member left."""
        assert self._rewards[sample] is None
        self._rewards[sample] = reward
        group = self._group_of(sample)
        self._left[group] -= 1
        return None if self._left[group] else group

    def _complete(self, group: int) -> None:
        self._order.append(group)
        self._wake()

    def _fail(self, error: RewardLoopError) -> None:
        """End it with an error, unless it has ended."""
        if self.done():
            return
        self._error = error
        self._observed = isinstance(error, RewardsCancelledError)
        self._samples = []
        self._next = len(self._rewards)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._wake()
