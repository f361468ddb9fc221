"""What an agent has to know again after its process was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_loop.types import Reward

__all__ = ["Entry", "Journal"]


@dataclass
class Entry:
    """A batch, and what has become of it so far."""

    data: Any
    """The batch as it was submitted."""
    group_size: int
    rewards: dict[int, Reward] = field(default_factory=dict)
    """By the samples' places, the members of each group beside each other; post-processed in groups handed out."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """The groups that were handed out, by the call that asked for them."""

    @property
    def handed_out(self) -> list[int]:
        """The groups that were handed out, in that order."""
        return [group for groups in self.answers.values() for group in groups]


class Journal:
    """The batches that an agent has taken, each under a name. A Ray actor beside the agent holds a copy.

    What is noted twice counts once. Each method that notes something says whether it knew the batches: a journal that
    was killed itself has to be told everything again, with `replace`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._arguments: Any = None
        self._starts = 0

    def started(self) -> int:
        """An agent begins. Return how many have since the last one came to a new reward."""
        self._starts += 1
        return self._starts

    def replace(self, entries: Mapping[str, Entry], arguments: Any) -> None:
        """Hold exactly this."""
        self._entries, self._arguments = dict(entries), arguments

    def arguments(self) -> Any:
        """Return what the agent was made with."""
        return self._arguments

    def entries(self) -> dict[str, Entry]:
        """Return the batches, in order of submission."""
        return self._entries

    def submitted(self, batch: str, entry: Entry) -> bool:
        """A batch was submitted."""
        self._entries.setdefault(batch, entry)
        return self._arguments is not None

    def ended(self, rewards: Mapping[str, Mapping[int, Reward]]) -> bool:
        """Samples of some batches have ended."""
        for batch, new in rewards.items():
            known = self._entries[batch].rewards if batch in self._entries else {}
            if new.keys() - known.keys():
                self._starts = 0
            for sample, reward in new.items():
                known.setdefault(sample, reward)
        return rewards.keys() <= self._entries.keys()

    def handed_out(self, batch: str, call: str, groups: Sequence[int], rewards: Mapping[int, Reward]) -> bool:
        """Groups were handed out. What a call got is kept until a later batch is handed out entirely."""
        entry = self._entries.get(batch)
        if entry is None:
            return False
        self._starts = 0
        entry.answers[call] = list(groups)
        entry.rewards |= rewards
        if self._is_finished(entry):
            for name, other in list(self._entries.items()):
                if name != batch and self._is_finished(other):
                    del self._entries[name]
        return True

    def dropped(self, batch: str) -> bool:
        """An error ended the batch."""
        return self._entries.pop(batch, None) is not None

    @staticmethod
    def _is_finished(entry: Entry) -> bool:
        return len(entry.handed_out) * entry.group_size == len(entry.data)
