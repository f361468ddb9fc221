"""How far the rollouts are, and where the seconds of a training step went. Plain objects: no verl, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "Progress", "StepTimes"]

Event = tuple[Literal["judging", "judged", "generated", "over"], str]
"""What happened to a prompt, and its uid: the judging of one of its sessions began, or ended; all its sessions are
generated; all its sessions have ended, rewards included."""


class Progress:
    """What is known of the prompts that were handed to the rollout and not trained on."""

    def __init__(self) -> None:
        self.generating: set[str] = set()
        """Prompts with sessions that are being generated."""
        self.unfinished: set[str] = set()
        """Prompts that lack a rollout or a reward."""
        self.events = 0
        """How many things have happened."""
        self.pending = 0
        """Rewards that are out."""
        self.most_pending = 0
        """The most there were since the last `start_step`."""
        self._judging_s = 0.0
        self._out_since = 0.0
        self._out: dict[str, tuple[int, float]] = {}
        """By prompt: how many rewards are out, and since when at least one has been."""

    def submit(self, uids: Iterable[str]) -> None:
        """Prompts were handed to the rollout."""
        for uid in uids:
            self.generating.add(uid)
            self.unfinished.add(uid)

    def happened(self, event: Event, at: float) -> None:
        """Takes an event in. ``at`` is in seconds, on any clock that does not jump."""
        kind, uid = event
        self.events += 1
        if kind == "judging":
            if not self.pending:
                self._out_since = at
            self.pending += 1
            self.most_pending = max(self.most_pending, self.pending)
            count, since = self._out.get(uid, (0, at))
            self._out[uid] = (count + 1, since)
        elif kind == "judged":
            self.pending -= 1
            count, since = self._out.pop(uid, (1, at))
            if count > 1:
                self._out[uid] = (count - 1, since)
            if not self.pending:
                self._judging_s += at - self._out_since
        else:
            self.generating.discard(uid)
            if kind == "over":
                self.unfinished.discard(uid)

    def start_step(self, at: float) -> None:
        """A training step begins."""
        self.most_pending = self.pending
        self._judging_s = 0.0
        self._out_since = at

    def judging_s(self, at: float) -> float:
        """In how many seconds since the step began rewards were out, of whatever batch."""
        return self._judging_s + (at - self._out_since if self.pending else 0.0)

    def oldest(self, now: float) -> float:
        """How many seconds ago the judging of a prompt began that has had rewards out ever since, at the most."""
        return max((now - since for _, since in self._out.values()), default=0.0)

    def forget(self, uids: Iterable[str]) -> None:
        """Prompts were thrown away."""
        for uid in uids:
            self.generating.discard(uid)
            self.unfinished.discard(uid)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the seconds of a training step went. They add up to the step, but for what verl does between the parts."""

    step: float
    """The whole step, with the synchronisation of weights, and without checkpoint and validation."""
    generation: float
    """The trainer waited for rollouts."""
    waiting: float
    """All rollouts that it needed were there, and it waited for rewards."""
    training: float
    """Everything between the rollouts and the next step's, the wait excluded: log-probabilities, values, advantages,
    updates, and the synchronisation of weights."""
    judging: float
    """Rewards were out, of this batch or of the next one."""

    @property
    def floor(self) -> float:
        """Seconds that the step would have taken, had all its judging been hidden: generation and training, or
        judging. Both are parts of the step, so that it is never longer."""
        return max(self.generation + self.training, self.judging)

    def metrics(self) -> dict[str, float]:
        """The names and values for verl's logger."""
        return {
            "reward_pipeline/generation_s": self.generation,
            "reward_pipeline/judging_s": self.judging,
            "reward_pipeline/training_s": self.training,
            "reward_pipeline/waiting_for_rewards_s": self.waiting,
            "reward_pipeline/waiting_share": self.waiting / self.step if self.step else 0.0,
            "reward_pipeline/hidden_share": 1 - min(1.0, self.waiting / self.judging) if self.judging else 1.0,
            "reward_pipeline/floor_s": self.floor,
            "reward_pipeline/over_floor": self.step / self.floor - 1 if self.floor else 0.0,
        }
