"""The progress of rollouts and rewards, and the seconds of a training step by part. No verl, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

__all__ = ["GENERATED", "Event", "Progress", "overlap_metrics"]

GENERATED = "generated"
"""The tag of a prompt whose sessions have all been generated and published. It is not a value of the tag ``status``,
because verl rejects unknown statuses."""

Event = tuple[Literal["judging", "judged", "generated", "published", "over", "failed"], str]
"""The kind of an event, and its subject:

- ``judging``, ``judged``: judging of the session ``{uid}_{number}`` began or ended;
- ``generated``: all sessions of the prompt ``uid`` are generated;
- ``published``: the trajectories of the prompt are in TransferQueue;
- ``over``: all sessions of the prompt have ended, rewards included;
- ``failed``: a session failed without a trajectory; the subject is the session and the error.
"""


class Progress:
    """The progress of the prompts that have been submitted to the rollout.

    ``generating`` is a subset of ``unpublished``, and ``unpublished`` of ``unfinished``.
    """

    def __init__(self) -> None:
        self.generating: set[str] = set()
        """Uids of prompts with sessions that are being generated."""
        self.unpublished: set[str] = set()
        """Uids of prompts with sessions whose trajectories are still to be written to TransferQueue."""
        self.unfinished: set[str] = set()
        """Uids of prompts that lack a rollout or a reward."""
        self.events = 0
        """The number of events so far."""
        self.most_pending = 0
        """The largest number of rewards pending at the same time since the last `start_step`."""
        self.failure = ""
        """The latest session that failed without a trajectory, and its error."""
        self._out: dict[str, float] = {}
        """Session with a pending reward -> the time of the request."""
        self._arrived: list[tuple[float, float]] = []
        """The times of the request and of the arrival, for each reward that arrived since the last `start_step`."""

    @property
    def _stages(self) -> tuple[set[str], ...]:
        return self.generating, self.unpublished, self.unfinished

    @property
    def pending(self) -> int:
        """The number of pending rewards."""
        return len(self._out)

    def submit(self, uids: Iterable[str]) -> None:
        """Records that prompts were submitted to the rollout."""
        for uid in uids:
            for stage in self._stages:
                stage.add(uid)

    def record(self, event: Event, at: float) -> None:
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

    def record_tags(self, prompts: Mapping[str, Mapping[str, Any]], at: float) -> None:
        """Records what the tags of prompts in TransferQueue show, and the events so far do not.

        Args:
            prompts: prompt uid -> its tags; see `GENERATED`.
            at: as in `record`.
        """
        for uid, tag in prompts.items():
            if uid in self.unfinished and tag["status"] in ("finished", "failure"):
                self.record(("over", uid), at)
            elif uid in self.unpublished and tag.get(GENERATED):
                self.record(("published", uid), at)

    def restart(self, uids: Collection[str]) -> None:
        """Records that the worker of these prompts has died: the unfinished ones are generated again.

        `record_tags` then moves those on that are further. Counts as an event.
        """
        self.events += 1
        self._out = {session: at for session, at in self._out.items() if session.rsplit("_", 1)[0] not in uids}
        self.submit(self.unfinished.intersection(uids))

    def start_step(self) -> None:
        """Starts the counts of a training step."""
        self.most_pending = self.pending
        self._arrived = []

    def judging_s(self) -> float:
        """Estimates how many seconds judging takes alone, for the rewards that arrived since the step began.

        The estimate assumes that all these rewards are requested at once. A reward counts in the step in which it
        arrives, with all the seconds since its request, including those before the step. Judging takes as long as the
        slowest of these rewards, or longer if judges return a limited number of rewards a second. That rate is taken
        from the shortest time in which half of the rewards arrived. The result is at most the time during which at
        least one of these rewards was pending. Times in which judges are idle, or only a few of them work, do not
        count.
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
        """Returns the age of the oldest pending reward, in seconds; 0 if there is none."""
        return max((now - since for since in self._out.values()), default=0.0)

    def metrics(self, now: float) -> dict[str, float]:
        """Returns the metrics of pending rewards for verl's logger, by name."""
        return {
            "reward_pipeline/rewards_pending": self.pending,
            "reward_pipeline/rewards_pending_max": self.most_pending,
            "reward_pipeline/oldest_reward_s": self.oldest(now),
        }

    def forget(self, uids: Iterable[str]) -> None:
        """Removes prompts that were evicted."""
        for uid in uids:
            for stage in self._stages:
                stage.discard(uid)


def _union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of the intervals, in seconds."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def overlap_metrics(step: float, *, generation: float, waiting: float, judging: float) -> dict[str, float]:
    """Returns the metrics of the seconds of a training step by part, for verl's logger, by name.

    Args:
        step: the whole step, with the weight synchronisation, without checkpoint and validation. Its rest, after
            generation and waiting, is training: log-probabilities, values, advantages, updates, and weights.
        generation: waiting for rollouts.
        waiting: waiting for rewards, while no rollout is missing.
        judging: judging alone, for the rewards that arrived in the step; see `Progress.judging_s`.
    """
    # The step if all judging were hidden. Judging that began before the step counts at most as long as the step.
    floor = max(step - waiting, min(judging, step))
    return {
        "reward_pipeline/generation_s": generation,
        "reward_pipeline/judging_s": judging,
        "reward_pipeline/training_s": step - generation - waiting,
        "reward_pipeline/waiting_for_rewards_s": waiting,
        "reward_pipeline/waiting_share": waiting / step if step else 0.0,
        "reward_pipeline/hidden_share": 1 - min(1.0, waiting / judging) if judging else 1.0,
        "reward_pipeline/floor_s": floor,
        "reward_pipeline/over_floor": step / floor - 1 if floor else 0.0,
    }
