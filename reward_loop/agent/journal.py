"""The state that an agent needs to continue after its process was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward_loop.types import Reward

__all__ = ["Entry", "Journal"]


@dataclass
class Entry:
    """A submitted batch, its rewards so far, and the groups handed out."""

    data: Any
    """The batch as it was submitted."""
    group_size: int
    rewards: dict[int, Reward] = field(default_factory=dict)
    """By sample index; members of a group are neighbours. Groups that were handed out are post-processed."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """The groups handed out, by the call that received them."""

    @property
    def handed_out(self) -> list[int]:
        """The groups handed out, in that order."""
        return [group for groups in self.answers.values() for group in groups]


class Journal:
    """The batches of an agent, by name. A second Ray actor holds a copy.

    Every method is idempotent. Methods that record something return whether the journal had all batches they name; if
    not, the journal was restarted empty, and the agent must send everything again with `replace`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._arguments: Any = None
        self._starts = 0

    def started(self) -> int:
        """Record the start of an agent process; return the number of starts since the last new reward."""
        self._starts += 1
        return self._starts

    def replace(self, entries: Mapping[str, Entry], arguments: Any) -> None:
        """Replace the whole content."""
        self._entries, self._arguments = dict(entries), arguments

    def arguments(self) -> Any:
        """Return the arguments of the agent."""
        return self._arguments

    def entries(self) -> dict[str, Entry]:
        """Return the batches, in order of submission."""
        return self._entries

    def submitted(self, batch: str, entry: Entry) -> bool:
        """Record a submitted batch."""
        self._entries.setdefault(batch, entry)
        return self._arguments is not None

    def ended(self, rewards: Mapping[str, Mapping[int, Reward]]) -> bool:
        """Record rewards of some batches."""
        for batch, new in rewards.items():
            known = self._entries[batch].rewards if batch in self._entries else {}
            if new.keys() - known.keys():
                self._starts = 0
            for sample, reward in new.items():
                known.setdefault(sample, reward)
        return rewards.keys() <= self._entries.keys()

    def handed_out(self, batch: str, call: str, groups: Sequence[int], rewards: Mapping[int, Reward]) -> bool:
        """Record groups that were handed out. They are kept until a later batch was handed out completely."""
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
        """Record that an error ended the batch."""
        return self._entries.pop(batch, None) is not None

    @staticmethod
    def _is_finished(entry: Entry) -> bool:
        return len(entry.handed_out) * entry.group_size == len(entry.data)
