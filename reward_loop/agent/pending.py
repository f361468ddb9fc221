"""The rewards of a submitted batch, as a future that completes group by group."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from reward_loop.agent.batch import Batch
from reward_loop.errors import ConfigError
from reward_loop.types import Reward

__all__ = ["BatchView", "Group", "MiniBatch", "PendingRewards"]


@dataclass(frozen=True, slots=True)
class Group:
    """A complete group: all its members have a reward."""

    index: int
    """The index of the group in its batch."""
    indices: range
    """The indices of its samples in the batch."""
    rewards: list[Reward]
    """The members' rewards, in order of submission."""

    @property
    def scores(self) -> list[float]:
        """The members' ``reward_score``."""
        return [reward["reward_score"] for reward in self.rewards]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Some complete groups of one batch, in order of completion."""

    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def indices(self) -> list[int]:
        """The indices of all its samples in the batch, group by group."""
        return [i for group in self.groups for i in group.indices]

    @property
    def rewards(self) -> list[Reward]:
        """The rewards of all its samples, in the order of `indices`."""
        return [reward for group in self.groups for reward in group.rewards]


class BatchView:
    """What can be read of a submitted batch at any time, in any thread."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __repr__(self) -> str:
        batch = self._batch
        state = "failed" if batch.error else "done" if batch.ended else "pending"
        tag = "" if batch.tag is None else f", tag={batch.tag!r}"
        return f"{type(self).__name__}({state}, {self.completed} of {self.group_count} groups{tag})"

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._batch)

    @property
    def number(self) -> int:
        """Counts the agent's batches, in order of submission."""
        return self._batch.number

    @property
    def priority(self) -> float:
        """The priority given to `RewardAgent.submit`."""
        return self._batch.priority

    @property
    def tag(self) -> Any:
        """The tag given to `RewardAgent.submit`."""
        return self._batch.tag

    @property
    def group_count(self) -> int:
        """The number of groups."""
        return self._batch.group_count

    @property
    def completed(self) -> int:
        """The number of complete groups."""
        return len(self._batch.completed_groups)

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended the batch."""
        return self._batch.ended

    def complete_groups(self, first: int = 0, last: int | None = None) -> list[Group]:
        """Return the complete groups ``first`` to ``last - 1``, counted in order of completion."""
        return [self._group(index) for index in self._batch.completed_groups[first:last]]

    def _group(self, index: int) -> Group:
        members = self._batch.members(index)
        rewards = self._batch.rewards[members.start : members.stop]
        return Group(index, members, [reward for reward in rewards if reward is not None])


class PendingRewards(BatchView):
    """The rewards of one batch; `RewardAgent.submit` returns it.

    Await it to get all rewards in order of submission. Iterate over it (``async for``) to get each `Group` when it is
    complete. Both work more than once and from several tasks; each iteration starts with the first group. A cancelled
    ``await`` does not cancel the batch: `cancel` does.

    An error that must stop the run (the policy ``raise``, too many failures, a bug in the manager) ends the batch: its
    other samples are cancelled, and every ``await`` and iteration raises the error.
    """

    __slots__ = ()

    def cancel(self) -> None:
        """Cancel the samples that have not ended. All who wait get a `RewardsCancelledError`."""
        self._batch.cancel()

    def __await__(self) -> Generator[Any, None, list[Reward]]:
        return self.all().__await__()

    def __aiter__(self) -> AsyncGenerator[Group, None]:
        return self.groups()

    async def all(self) -> list[Reward]:
        """Wait for all rewards, in order of submission; the same as ``await pending``."""
        return await self._batch.all()

    async def wait(self, groups: int) -> int:
        """Wait until that many groups, or all, are complete; return the number of complete groups."""
        return await self._batch.wait(groups)

    async def groups(self) -> AsyncGenerator[Group, None]:
        """Yield the groups as they complete."""
        async with aclosing(self.mini_batches(1)) as mini_batches:
            async for mini_batch in mini_batches:
                yield mini_batch.groups[0]

    async def mini_batches(self, groups: int) -> AsyncGenerator[MiniBatch, None]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch needs at least one group, not {groups}")
        yielded = 0
        try:
            while yielded < self.group_count:
                await self.wait(yielded + groups)
                chosen = self.complete_groups(yielded, yielded + groups)
                yielded += len(chosen)
                yield MiniBatch(tuple(chosen))
        finally:
            if yielded == self.group_count:
                self._batch.on_delivered(self._batch)
