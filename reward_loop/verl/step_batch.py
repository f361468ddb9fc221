"""The batch of a training step in the mode ``reward_pipeline``: which of its rows can be trained on next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Self

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.utils import MetricsAggregator

from reward_loop.errors import RewardLoopError
from reward_loop.verl.compat import uses
from reward_loop.verl.trajectory_keys import uid_of

__all__ = ["StepBatch"]

uses(
    __name__,
    "verl.trainer.ppo.v1.utils:MetricsAggregator",
    "add_step_metrics(metrics, sample_count)",
    "get_aggregated_metrics()",
)


@dataclass
class StepBatch:
    """The rows of a training step, from the end of its generation.

    A row is in one of `groups`, then in `rows` or in `spare`, and then in a mini-batch.
    """

    uids: list[str]
    """The uids of its prompts."""
    whole: KVBatchMeta
    """All rows, including verl's padding."""
    groups: dict[str, list[int]]
    """The groups that have not been trained on: prompt uid -> positions of its rows in `whole`."""
    spare: list[int]
    """The rows that can pad a mini-batch: verl's padding, and rows without a reward."""
    in_order: bool = False
    """Whether mini-batches must not depend on the order in which rewards arrive."""
    rows: list[int] = field(default_factory=list)
    """Rows that have an advantage, and wait until their mini-batch is full."""
    trained: list[int] = field(default_factory=list)
    """Rows with an advantage that have been in a mini-batch."""
    metrics: MetricsAggregator = field(default_factory=MetricsAggregator)
    updates: int = 0
    """The number of update calls to the workers."""
    nothing: RewardLoopError | None = None
    """Why a part of the batch has no advantage."""

    @classmethod
    def of(cls, uids: list[str], whole: KVBatchMeta, *, in_order: bool) -> Self:
        """Return the batch of these prompts, oldest first; ``whole`` are the rows of their rollouts, and padding."""
        # Also for a prompt whose rollouts all failed: the group is complete, and has no rows.
        groups: dict[str, list[int]] = {uid: [] for uid in uids}
        spare = []
        for position, (key, tag) in enumerate(zip(whole.keys, whole.tags, strict=True)):
            if tag.get("is_padding"):
                spare.append(position)
            else:
                groups[uid_of(key)].append(position)
        return cls(uids, whole, groups, spare, in_order)

    def complete_groups(self, unfinished: Collection[str]) -> list[str]:
        """Return the uids of the groups that can be trained on next, in order: all their rewards have arrived."""
        if self.in_order:
            return list(takewhile(lambda uid: uid not in unfinished, self.groups))
        return [uid for uid in self.groups if uid not in unfinished]

    def ready_mini_batches(self, unfinished: Collection[str], total: int, size: int) -> int:
        """Return how many mini-batches have all their rewards, including those already trained on.

        ``total`` is the number of mini-batches of the step, and ``size`` the number of groups in one.
        """
        complete = len(self.complete_groups(unfinished))
        if complete == len(self.groups):
            return total
        trained = len(self.uids) - len(self.groups)
        # The last mini-batch takes all groups that are left, so it is ready only with all of them.
        return min(total - 1, (trained + complete) // size)

    def staleness(self, step: int) -> list[int]:
        """Return, for each trajectory, how many training steps older its weights are than those of step ``step``."""
        versions = [tag["min_global_steps"] for tag in self.whole.tags if not tag.get("is_padding")]
        return [step - 1 - version for version in versions]

    def take_groups(self, uids: list[str]) -> list[int]:
        """Remove these groups from `groups`, and return their rows."""
        rows = [row for uid in uids for row in self.groups.pop(uid)]
        if not self.in_order:
            # In the order in which verl has balanced the batch over the ranks.
            return sorted(rows)
        place = {uid: number for number, uid in enumerate(uids)}
        return sorted(rows, key=lambda row: (place[uid_of(self.whole.keys[row])], self.whole.keys[row]))

    def add(self, rows: list[int], learners: Sequence[str]) -> None:
        """Add rows of complete groups: those with these keys to `rows`, the others to `spare`."""
        there = set(learners)
        for row in rows:
            (self.rows if self.whole.keys[row] in there else self.spare).append(row)

    def take_updates(self, size: int, *, last: bool) -> list[tuple[list[int], list[int]]]:
        """Remove the rows of full update calls from `rows`. Returns the rows of each, and the rows that pad it.

        Args:
            size: the number of rows of an update call: those of a mini-batch, or of several.
            last: whether all groups are complete. Then the rest is padded to a full call.
        """
        made = []
        while len(self.rows) >= size or (last and self.rows):
            rows, self.rows = self.rows[:size], self.rows[size:]
            missing = size - len(rows)
            padding, self.spare = self.spare[:missing], self.spare[missing:]
            self.trained += rows
            made.append((rows, padding))
        return made
