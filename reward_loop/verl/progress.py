"""How far the rollouts are, and where the seconds of a training step went. Plain objects: no verl, no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
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
        self._out: Counter[str] = Counter()
        self._judged: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """For each prompt, from when to when rewards of it were out."""
        self._last_reward = float("-inf")

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
            self.pending += 1
            self.most_pending = max(self.most_pending, self.pending)
            if not self._out[uid]:
                self._judged[uid].append((at, at))
            self._out[uid] += 1
        elif kind == "judged":
            self.pending -= 1
            if times := self._judged.get(uid):  # it may have been thrown out meanwhile
                self._out[uid] -= 1
                times[-1] = (times[-1][0], at)
        else:
            self.generating.discard(uid)
            if kind == "over":
                self.unfinished.discard(uid)

    def oldest(self, now: float) -> float:
        """How many seconds ago the judging of a prompt began that has had rewards out ever since, at the most."""
        return max((now - times[-1][0] for uid, times in self._judged.items() if self._out[uid]), default=0.0)

    def start_step(self) -> None:
        """A training step begins."""
        self.most_pending = self.pending

    def finish(self, uids: Collection[str]) -> float:
        """Forgets the prompts of a batch that was trained on; returns how many seconds their judging took.

        These are the seconds in which rewards of the batch were out, without those before the last reward of the batch
        before: until then the judges were busy with that one.
        """
        seconds, until = 0.0, self._last_reward
        for begin, end in sorted(times for uid in uids for times in self._judged.get(uid, ())):
            seconds += max(0.0, end - max(begin, until))
            until = max(until, end)
        self._last_reward = until
        self.forget(uids)
        return seconds

    def forget(self, uids: Iterable[str]) -> None:
        """Prompts were thrown away."""
        for uid in uids:
            self.generating.discard(uid)
            self.unfinished.discard(uid)
            self._judged.pop(uid, None)
            self._out.pop(uid, None)


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
    """Rewards of the batch were out, and all of the batch before were in."""

    @property
    def floor(self) -> float:
        """Seconds that steps take at least, with both overlaps: generation and training, or judging. As a batch may be
        judged in the step before its own, a single step can be shorter."""
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
