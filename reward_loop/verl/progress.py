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
        """Sessions whose rewards have not arrived, and the time at which each reward was requested."""
        self._arrived: list[tuple[float, float]] = []
        """The rewards that arrived since the last `start_step`: the time of the request and of the arrival."""

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
        """Records an event. ``at`` is in seconds, on a clock that does not jump."""
        kind, name = event
        self.events += 1
        if kind == "judging":
            self._out[name] = at
            self.most_pending = max(self.most_pending, self.pending)
        elif kind == "judged":
            self._arrived.append((self._out.pop(name), at))
        elif kind == "failed":
            self.failure = name
        else:
            ended = ("generated", "published", "over").index(kind) + 1
            for stage in self._stages[:ended]:
                stage.discard(name)

    def start_step(self) -> None:
        """Starts the counts of a training step."""
        self.most_pending = self.pending
        self._arrived = []

    def judging_s(self) -> float:
        """Seconds of judging for the rewards that arrived since the step began, if
        all of them had been requested at once.

        A reward counts in the step in which it arrives, with all the seconds since its request, those before the step
        included. Judging takes as long as the slowest of these rewards, or longer if judges return a limited number of
        rewards a second. That rate is taken from the shortest time in which half of the rewards arrived. The result is
        at most the time during which at least one of these rewards was pending. Times in which judges are idle, or
        only a few of them work, do not count.
        """
        if not self._arrived:
            return 0.0
        longest = max(arrived - requested for requested, arrived in self._arrived)
        arrivals = sorted(arrived for _, arrived in self._arrived)
        half = len(arrivals) // 2
        if not half:
            return longest
        fastest = min(later - sooner for sooner, later in zip(arrivals, arrivals[half:], strict=False))
        return min(_union_s(self._arrived), max(longest, fastest * len(arrivals) / half))

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


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The seconds that lie in at least one of the intervals."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


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
    """The judging of the rewards that arrived in the step, by itself; see `Progress.judging_s`."""

    @property
    def floor(self) -> float:
        """Seconds that the step would have taken with all its judging hidden: generation and training, or judging,
        whichever is longer. Judging that began before the step may be longer than the step; the floor never is."""
        return max(self.generation + self.training, min(self.judging, self.step))

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
