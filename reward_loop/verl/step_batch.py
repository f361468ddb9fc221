"""The batch of a training step in the mode ``reward_pipeline``: which of its rows can be trained on next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Self

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.utils import MetricsAggregator

from reward_loop.errors import RewardLoopError
from reward_loop.verl.trajectory_keys import uid_of

__all__ = ["StepBatch"]


@dataclass
class StepBatch:
    """The rows of a training step, from the end of its generation.

    A row is in one of `groups` or in `padding`, then in `rows`, and then in a mini-batch.
    """

    uids: list[str]
    """The uids of its prompts."""
    whole: KVBatchMeta
    """All rows, including padding rows."""
    groups: dict[str, list[int]]
    """The groups that have not been trained on: prompt uid -> positions of its rows in `whole`."""
    padding: list[int]
    """The positions of padding rows."""
    in_order: bool = False
    """Whether mini-batches must not depend on the order in which rewards arrive."""
    rows: list[int] = field(default_factory=list)
    """Rows that have an advantage or are masked, and wait until their mini-batch is full."""
    metrics: MetricsAggregator = field(default_factory=MetricsAggregator)
    updates: int = 0
    """The number of update calls to the workers."""
    learnable: bool = False
    """Whether any row has an advantage."""
    nothing: RewardLoopError | None = None
    """Why a part of the batch has no advantage."""

    @classmethod
    def of(cls, uids: list[str], whole: KVBatchMeta, *, in_order: bool) -> Self:
        """Returns the batch of these prompts, oldest first; ``whole`` are the rows of their rollouts, and padding."""
        groups: dict[str, list[int]] = {uid: [] for uid in uids}
        padding = []
        for position, (key, tag) in enumerate(zip(whole.keys, whole.tags, strict=True)):
            if tag.get("is_padding"):
                padding.append(position)
            else:
                groups[uid_of(key)].append(position)
        return cls(uids, whole, groups, padding, in_order)

    def complete_groups(self, unfinished: Collection[str]) -> list[str]:
        """Returns the uids of the groups that can be trained on next, in order: all their rewards have arrived."""
        if self.in_order:
            return list(takewhile(lambda uid: uid not in unfinished, self.groups))
        return [uid for uid in self.groups if uid not in unfinished]

    def ready_mini_batches(self, unfinished: Collection[str], total: int, size: int) -> int:
        """Returns how many mini-batches have all their rewards, including those already trained on.

        ``total`` is the number of mini-batches of the step, and ``size`` the number of groups in one.
        """
        complete = len(self.complete_groups(unfinished))
        if complete == len(self.groups):
            return total
        trained = len(self.uids) - len(self.groups)
        return min(total - 1, (trained + complete) // size)

    def keys(self, rows: Sequence[int]) -> list[str]:
        """Returns the keys of the rows at these positions."""
        return [self.whole.keys[row] for row in rows]

    def staleness(self, step: int) -> list[int]:
        """Returns, for each trajectory, how many training steps older its weights are than those of step ``step``."""
        versions = [tag["min_global_steps"] for tag in self.whole.tags if not tag.get("is_padding")]
        return [step - 1 - version for version in versions]

    def take_groups(self, uids: list[str]) -> list[int]:
        """Removes these groups from `groups`, and returns their rows."""
        rows = [row for uid in uids for row in self.groups.pop(uid)]
        if not self.in_order:
            return sorted(rows)
        place = {uid: number for number, uid in enumerate(uids)}
        return sorted(rows, key=lambda row: (place[uid_of(self.whole.keys[row])], self.whole.keys[row]))

    def take_mini_batches(self, multiple: int) -> list[list[int]]:
        """Removes full mini-batches from `rows`, and returns one list of rows per update call.

        One call is cheaper than several. With `in_order`, each mini-batch has its own call: otherwise the assignment of
        rows to ranks, and the rows that ``ppo_epochs`` repeats, would depend on the other mini-batches in the call.

        ``multiple`` is the number of rows of a mini-batch.
        """
        full = len(self.rows) // multiple * multiple
        now, self.rows = self.rows[:full], self.rows[full:]
        size = multiple if self.in_order else full
        return [now[first : first + size] for first in range(0, full, size)] if full else []
