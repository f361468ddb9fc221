"""The state of one submitted batch: its samples, the rewards so far, and who waits for them.

Invariants:

- A group is complete when all its members have a reward and, where the function has one, ``post_process_scores`` has
  run. `completed_groups` lists complete groups in order of completion; a group appears there once.
- A batch ends once: when its last group is complete, or with the first error. After that nothing changes.
- Everything here runs on the agent's event loop, except reads of `completed_groups`, `error` and lengths, which only
  grow or are set once.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any

from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.types import Reward

__all__ = ["Batch", "group_sizes"]


@dataclass(slots=True, eq=False)
class Batch:
    """One submitted batch. `RewardAgent` changes it; `PendingRewards` shows it to users.

    Raises:
        ConfigError: a group is empty, or the sizes of the groups do not add up to the number of samples.
    """

    samples: list[Any]
    """Members of a group are neighbours. Empty after an error."""
    sizes: InitVar[Sequence[int]]
    """The size of each group."""
    number: int
    """Counts the agent's batches, in order of submission."""
    priority: float
    """Batches with a lower number start first."""
    tag: Any
    """The caller's own mark of the batch."""
    on_delivered: Callable[[Batch], None]
    """Called when the user has received all rewards, or the error, or has cancelled the batch."""
    post_process: bool = True
    """Whether ``post_process_scores`` runs on its groups; False for a single member of a larger group."""
    timings: dict[int, tuple[float, float]] = field(default_factory=dict)
    """For the user's ``log``: by sample, the seconds from start to end, and the time of the end."""
    rewards: list[Reward | None] = field(init=False)
    completed_groups: list[int] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    error: RewardLoopError | None = None
    error_was_raised: bool = False
    """Whether somebody received the error, or it needs no receiver because the user cancelled the batch."""
    _starts: list[int] = field(init=False)
    """The index of the first sample of each group, and the number of samples."""
    _left: list[int] = field(init=False)
    """The number of members of each group that have no reward."""
    _next: int = 0
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self, sizes: Sequence[int]) -> None:
        if any(size < 1 for size in sizes) or sum(sizes) != len(self.samples):
            raise ConfigError(
                f"the groups have {sum(sizes)} samples in all, but {len(self.samples)} samples were given; "
                "each group needs at least one sample"
            )
        self.rewards = [None] * len(self.samples)
        self._starts = list(accumulate(sizes, initial=0))
        self._left = list(sizes)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def group_count(self) -> int:
        """The number of groups."""
        return len(self._left)

    @property
    def unstarted(self) -> int:
        """An upper bound for the number of samples that have not started."""
        return len(self.rewards) - self._next

    @property
    def ended(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended the batch."""
        return self.error is not None or len(self.completed_groups) == len(self._left)

    def members(self, group: int) -> range:
        """The indices of a group's samples."""
        return range(self._starts[group], self._starts[group + 1])

    def group_of(self, sample: int) -> int:
        """The group of a sample."""
        return bisect_right(self._starts, sample) - 1

    def next_sample(self) -> int | None:
        """Mark the next sample without a reward as started, and return its index; None if none is left."""
        while self._next < len(self.rewards):
            self._next += 1
            if self.rewards[self._next - 1] is None:
                return self._next - 1
        return None

    def add_reward(self, sample: int, reward: Reward) -> int | None:
        """Store the reward of a sample; return its group if all members of the group now have one."""
        assert self.rewards[sample] is None
        self.rewards[sample] = reward
        group = self.group_of(sample)
        self._left[group] -= 1
        return None if self._left[group] else group

    def restore(self, rewards: Sequence[Reward | None], completed: Sequence[int], *, whole_groups: bool) -> list[int]:
        """Fill a new batch from a checkpoint; return the groups that only lack their post-processing.

        With ``whole_groups``, an incomplete group starts again as a whole, because its members wait for each other.
        """
        self.rewards[:] = rewards
        self.completed_groups[:] = completed
        for group in completed:
            self._left[group] = 0
        unprocessed = []
        for group in sorted(set(range(self.group_count)).difference(completed)):
            members = self.members(group)
            if whole_groups:
                self.rewards[members.start : members.stop] = [None] * len(members)
            self._left[group] = sum(self.rewards[i] is None for i in members)
            if not self._left[group]:
                unprocessed.append(group)
        return unprocessed

    def complete(self, group: int) -> None:
        """Mark a group as complete, and wake those who wait."""
        self.completed_groups.append(group)
        self._wake()

    def fail(self, error: RewardLoopError) -> None:
        """End the batch with an error and cancel its running samples. No effect if it has ended."""
        if self.ended:
            return
        self.error = error
        self.error_was_raised = isinstance(error, RewardsCancelledError)
        self.samples = []
        self._next = len(self.rewards)
        for task in self.tasks:
            task.cancel()
        self._wake()

    def cancel(self) -> None:
        """End the batch at the user's request."""
        self.fail(RewardsCancelledError("this batch was cancelled before it was complete"))
        self.on_delivered(self)

    async def wait(self, groups: int) -> int:
        """Wait until that many groups, or all, are complete; return the number of complete groups.

        Raises:
            RewardLoopError: an error ended the batch.
        """
        while self.error is None and len(self.completed_groups) < min(groups, self.group_count):
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.error is not None:
            self.error_was_raised = True
            self.on_delivered(self)
            raise self.error
        return len(self.completed_groups)

    async def all(self) -> list[Reward]:
        """Wait for all rewards, in order of submission; the batch then counts as delivered."""
        await self.wait(self.group_count)
        self.on_delivered(self)
        return [reward for reward in self.rewards if reward is not None]

    def log_columns(self) -> dict[str, list[Any]]:
        """The arguments of the user's ``log``, which docs/agent.md describes. All rewards must be in."""
        rewards = [reward for reward in self.rewards if reward is not None]
        infos = [reward.get("reward_extra_info") or {} for reward in rewards]
        replies = [info.get("explanation") for info in infos]
        groups = [group for group in range(self.group_count) for _ in self.members(group)]
        timings = [self.timings.get(sample, (0.0, 0.0)) for sample in range(len(self))]  # none from before a restore
        return {
            "queries": [
                info.get("prompt", getattr(sample, "solution_str", None))
                for info, sample in zip(infos, self.samples, strict=True)
            ],
            "replies": replies,
            "results": replies,
            "scores": [reward["reward_score"] for reward in rewards],
            "latencies": [seconds for seconds, _ in timings],
            "groups": groups,
            "group_uids": groups,
            "timestamps": [datetime.fromtimestamp(ended).isoformat() for _, ended in timings],
        }

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def group_sizes(count: int, group_size: int | None, groups: Sequence[int] | None) -> Sequence[int]:
    """The size of each group of ``count`` samples; see `RewardAgent.submit`.

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
