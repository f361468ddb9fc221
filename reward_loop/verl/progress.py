"""How far the rollouts are, and where the seconds of a training step went. Plain objects: no verl, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "Losses", "Progress", "Refills", "StepTimes"]

Event = tuple[Literal["judging", "judged", "generated", "published", "over", "failed"], str]
"""What happened, and to what: the judging of a session (``{uid}_{number}``) began, or ended; all sessions of a prompt
(its uid) are generated; their trajectories are in TransferQueue; or they have ended, rewards included. Or a session
failed and has no trajectory, and why."""


class Progress:
    """What is known of the prompts that were handed to the rollout and not trained on."""

    def __init__(self) -> None:
        self.generating: set[str] = set()
        """Prompts with sessions that are being generated."""
        self.unpublished: set[str] = set()
        """Prompts with sessions whose trajectories are not in TransferQueue, and may still come."""
        self.unfinished: set[str] = set()
        """Prompts that lack a rollout or a reward."""
        self.events = 0
        """How many things have happened."""
        self.most_pending = 0
        """The most rewards that were out at a time since the last `start_step`."""
        self.failure = ""
        """The latest session that failed and has no trajectory, and why."""
        self._out: dict[str, float] = {}
        """The sessions whose rewards are out, and since when."""
        self._out_since = 0.0
        self._out_s = 0.0
        self._came: list[float] = []
        """When rewards came since the last `start_step`."""
        self._longest = 0.0
        """The longest time that one of those had been out."""

    @property
    def _stages(self) -> tuple[set[str], ...]:
        return self.generating, self.unpublished, self.unfinished

    @property
    def pending(self) -> int:
        """Rewards that are out."""
        return len(self._out)

    def submit(self, uids: Iterable[str]) -> None:
        """Prompts were handed to the rollout."""
        for uid in uids:
            for stage in self._stages:
                stage.add(uid)

    def happened(self, event: Event, at: float) -> None:
        """Takes an event in. ``at`` is in seconds, on any clock that does not jump."""
        kind, name = event
        self.events += 1
        if kind == "judging":
            if not self._out:
                self._out_since = at
            self._out[name] = at
            self.most_pending = max(self.most_pending, self.pending)
        elif kind == "judged":
            self._longest = max(self._longest, at - self._out.pop(name))
            self._came.append(at)
            if not self._out:
                self._out_s += at - self._out_since
        elif kind == "failed":
            self.failure = name
        else:
            ended = ("generated", "published", "over").index(kind) + 1
            for stage in self._stages[:ended]:
                stage.discard(name)

    def start_step(self, at: float) -> None:
        """A training step begins."""
        self.most_pending = self.pending
        self._out_s = self._longest = 0.0
        self._out_since = at
        self._came = []

    def judging_s(self, at: float) -> float:
        """Seconds that judging what was judged since the step began would have taken, had all of it been there at once.

        That is as long as the longest of it took, or longer, if the judges give out no more than so many rewards a
        second: as many as in the shortest time in which half of the rewards came. It is not longer than rewards were
        out. Where judges are idle now and then, or few are at work, that does not count.
        """
        out_s = self._out_s + (at - self._out_since if self._out else 0.0)
        half = len(self._came) // 2
        fastest = min(
            (later - sooner for sooner, later in zip(self._came, self._came[half:], strict=False)), default=0.0
        )
        return min(out_s, max(self._longest, fastest * len(self._came) / half if half else 0.0))

    def oldest(self, now: float) -> float:
        """For how many seconds a reward has been out, at the most."""
        return max((now - since for since in self._out.values()), default=0.0)

    def forget(self, uids: Iterable[str]) -> None:
        """Prompts were thrown away."""
        for uid in uids:
            for stage in self._stages:
                stage.discard(uid)


class Refills:
    """Counts how often in a row groups that failed were replaced, and all that replaced them failed, too.

    Args:
        bound: how often that may happen; ``None`` for any number.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._kept = 0
        self._in_a_row = 0
        self.filtered = 0
        """How many groups were thrown out although their rollouts did not fail."""

    def exhausted(self, *, failed: int, filtered: int, kept: int) -> bool:
        """Whether it has happened too often.

        Args:
            failed: how many groups are thrown out now because they failed.
            filtered: how many for another reason: their rollouts did not fail.
            kept: how many there are besides.
        """
        again = failed > 0 and not filtered and kept <= self._kept
        self._in_a_row = self._in_a_row + 1 if again else 0
        self._kept = kept
        self.filtered += filtered
        return self._bound is not None and self._in_a_row > self._bound


class Losses:
    """Counts groups that failed and were replaced, one after the other, where some are always under way.

    Args:
        bound: how many may fail before one ends well; ``None`` for any number.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._ended_well: frozenset[str] = frozenset()
        self.in_a_row = 0
        """How many have failed since the last one that ended well."""

    def exhausted(self, failed: int, ended_well: Iterable[str]) -> bool:
        """Whether too many have failed.

        Args:
            failed: how many are thrown out now because they failed.
            ended_well: all that did not fail, and are still there.
        """
        well = frozenset(ended_well)
        if well - self._ended_well:
            self.in_a_row = 0
        self._ended_well = well
        self.in_a_row += failed
        return self._bound is not None and self.in_a_row > self._bound


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
    """What judging takes by itself; see `Progress.judging_s`."""

    @property
    def floor(self) -> float:
        """Seconds that the step would have taken, had all its judging been hidden: generation and training, or
        judging. Neither is longer than the step."""
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
