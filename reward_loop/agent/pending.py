"""`PendingRewards`: the rewards of one submitted batch, as a future that completes group by group.

Invariants:

- A group is complete when all its members have a reward. A group completes once.
- A batch ends once: when its last group is complete, or with the first error. After that nothing changes.
- The state changes only on the agent's event loop. Other threads read it, and wait for it: what they read only grows,
  or is set once.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.types import Reward, RewardResult


@dataclass(frozen=True, slots=True)
class Group:
    """A complete group: all its members have a reward."""

    index: int
    """The index of the group in its batch."""
    indices: range
    """The indices of its samples in the batch."""
    rewards: list[Reward]
    """The members' rewards, in order of submission."""
    results: list[RewardResult]
    """The results from which the rewards were made."""

    @property
    def scores(self) -> list[float]:
        """The members' ``reward_score``."""
        return [reward["reward_score"] for reward in self.rewards]

    @property
    def unmasked(self) -> dict[int, float]:
        """The scores of the members that are not masked, by their indices in the batch."""
        members = zip(self.indices, self.rewards, self.results, strict=True)
        return {i: reward["reward_score"] for i, reward, result in members if not result.masked}


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Some complete groups of one batch, in order of completion. Iterating yields the groups."""

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


class PendingRewards:
    """The rewards of one batch; `RewardAgent.submit` returns it.

    Await it to get all rewards in order of submission. Iterate over it (``async for``) to get each `Group` when it is
    complete. Both work more than once and from several tasks; each iteration starts with the first group. A cancelled
    ``await`` does not cancel the batch: `cancel` does.

    An error that must stop the run (the policy ``raise``, too many failures, a bug in the manager) ends the batch: its
    other samples are cancelled, and every ``await`` and iteration raises the error.
    """

    def __init__(
        self,
        samples: list[Any],
        sizes: Sequence[int],
        number: int,
        has_sizes: bool,
        tasks: Mapping[asyncio.Task[None], PendingRewards],
        on_settled: Callable[[PendingRewards], None],
    ) -> None:
        """Create the state of a batch without any reward; only agents do.

        Args:
            samples: the samples; members of a group are neighbours.
            sizes: the size of each group.
            number: counts the agent's batches, in order of submission.
            has_sizes: whether the caller has given the sizes: then all members of each group are in the batch.
            tasks: the batch of each sample that the agent scores now, by its task.
            on_settled: called when the agent need not keep the batch any more: it is complete, its error was raised, or
                it was cancelled.

        Raises:
            ConfigError: a group is empty, or the sizes of the groups do not add up to the number of samples.
        """
        if any(size < 1 for size in sizes) or sum(sizes) != len(samples):
            raise ConfigError(
                f"the groups have {sum(sizes)} samples in all, but {len(samples)} samples were given; "
                "each group needs at least one sample"
            )
        self.number = number
        """Counts the agent's batches, in order of submission."""
        self.has_sizes = has_sizes
        """Whether the caller has given the sizes of the groups: then all members of each are in the batch."""
        self.error: RewardLoopError | None = None
        """The error that ended the batch, if one did."""
        self._samples = samples
        self._scored: list[tuple[RewardResult, Reward] | None] = [None] * len(samples)
        self._starts = list(accumulate(sizes, initial=0))
        """The index of the first sample of each group, and the number of samples."""
        self._left = list(sizes)
        """The number of members of each group that have no reward."""
        self._completed: list[int] = []
        """The complete groups, in order of completion."""
        self._changed, self._changed_for_threads = asyncio.Event(), threading.Condition()
        """Those who wait for the next complete group, or for the end of the batch."""
        self._tasks = tasks
        self._on_settled = on_settled

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._scored)

    @property
    def group_count(self) -> int:
        """The number of groups."""
        return len(self._left)

    @property
    def completed(self) -> int:
        """The number of complete groups."""
        return len(self._completed)

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended the batch."""
        return self.error is not None or self.completed == self.group_count

    def complete_groups(self, first: int = 0, last: int | None = None) -> list[Group]:
        """Return the complete groups ``first`` to ``last - 1``, counted in order of completion."""
        return [self._group(index) for index in self._completed[first:last]]

    def _group(self, index: int) -> Group:
        members = self._members(index)
        scored = [one for one in self._scored[members.start : members.stop] if one is not None]
        return Group(index, members, [reward for _, reward in scored], [result for result, _ in scored])

    def cancel(self) -> None:
        """Cancel the samples that have not ended. All who wait get a `RewardsCancelledError`."""
        self._fail(RewardsCancelledError("this batch was cancelled before it was complete"))

    def __await__(self) -> Generator[Any, None, list[Reward]]:
        return self.all().__await__()

    def __aiter__(self) -> AsyncGenerator[Group, None]:
        return self.groups()

    async def all(self) -> list[Reward]:
        """Wait for all rewards, in order of submission; the same as ``await pending``."""
        await self.wait(self.group_count)
        return [one[1] for one in self._scored if one is not None]

    async def results(self) -> list[RewardResult]:
        """Wait for the results from which all rewards were made, in order of submission."""
        await self.wait(self.group_count)
        return [one[0] for one in self._scored if one is not None]

    async def wait(self, groups: int) -> int:
        """Wait until that many groups, or all, are complete; return the number of complete groups.

        Raises:
            RewardLoopError: an error ended the batch.
        """
        while not self._has(groups):
            await self._changed.wait()
        return self._outcome()

    def _has(self, groups: int) -> bool:
        """Return whether that many groups, or all, are complete, or the batch has ended."""
        return self.error is not None or self.completed >= min(groups, self.group_count)

    def _wait_in_thread(self, groups: int, timeout: float | None) -> None:
        """Do as `wait` does, in a thread without an event loop; raise `TimeoutError` after ``timeout`` seconds."""
        with self._changed_for_threads:
            if not self._changed_for_threads.wait_for(lambda: self._has(groups), timeout):
                raise TimeoutError
        self._outcome()

    def _outcome(self) -> int:
        """Return the number of complete groups, or raise the error that ended the batch."""
        if self.error is not None:
            self._on_settled(self)
            raise self.error
        return self.completed

    async def groups(self) -> AsyncGenerator[Group, None]:
        """Yield the groups as they complete."""
        for number in range(self.group_count):
            await self.wait(number + 1)
            yield self._group(self._completed[number])

    async def mini_batches(self, groups: int) -> AsyncGenerator[MiniBatch, None]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch needs at least one group, not {groups}")
        for first in range(0, self.group_count, groups):
            await self.wait(first + groups)
            yield MiniBatch(tuple(self.complete_groups(first, first + groups)))

    def _members(self, group: int) -> range:
        """The indices of a group's samples."""
        return range(self._starts[group], self._starts[group + 1])

    def _group_of(self, sample: int) -> int:
        """The group of a sample."""
        return bisect_right(self._starts, sample) - 1

    def _add(self, sample: int, result: RewardResult, reward: Reward) -> None:
        """Store the reward of a sample. If it is the last one of its group, the group is complete."""
        if self.error is not None:  # user code has suppressed its cancellation, and an ended batch never changes
            return
        self._scored[sample] = result, reward
        group = self._group_of(sample)
        self._left[group] -= 1
        if not self._left[group]:
            self._completed.append(group)
            if self.done():
                self._on_settled(self)
            self._wake()

    def _fail(self, error: RewardLoopError) -> None:
        """End the batch with an error and cancel its running samples. No effect if it has ended."""
        if self.done():
            return
        self.error = error
        # The caller may keep an ended batch; its samples need not stay in memory.
        self._samples = []
        for task, batch in self._tasks.items():
            if batch is self:
                task.cancel()
        if isinstance(error, RewardsCancelledError):
            self._on_settled(self)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        with self._changed_for_threads:
            self._changed_for_threads.notify_all()


def group_sizes(count: int, group_size: int | None, groups: Sequence[int] | None) -> Sequence[int]:
    """Return the size of each group of ``count`` samples; see `RewardAgent.submit`.

    Raises:
        ConfigError: both were given, or ``count`` is not a multiple of ``group_size``.
    """
    if groups is not None:
        if group_size is not None:
            raise ConfigError("group_size and groups exclude each other: give one of them")
        return groups
    size = 1 if group_size is None else group_size
    if size < 1 or count % size:
        raise ConfigError(f"{count} samples do not divide into groups of {size}: give the sizes as groups=[...]")
    return [size] * (count // size)
