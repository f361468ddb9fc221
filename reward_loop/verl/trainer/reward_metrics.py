"""The metrics of the rewards of a training step and of a validation, and the seconds of a step by part.

verl merges the metrics of a step's parts by words such as "sum", "min" and "max" anywhere in a name, and averages
counts. So the metrics here are computed once per step, from all its samples.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reward_loop.records import Interval, hidden_share, seconds_of
from reward_loop.types import MEASURED, RESERVED_KEYS, Outcome, Reward, RewardResult, finite_number
from reward_loop.verl.samples import final_outputs, session_of, uid_of

Info = Mapping[str, Any]
"""The ``reward_extra_info`` of a trajectory."""

_MEASURED = frozenset(f"reward_{name}" for name in MEASURED) - {"reward_outage_s"}
"""Keys of the values that the reward loop measures for every sample."""


@dataclass(slots=True)
class TrajectoryReward:
    """The reward of a trajectory, of one output of a session, as TransferQueue has it."""

    info: Info
    reward: float
    """The sum of the rewards of its tokens; 0 if that is not a finite number."""
    tokens: int = 0
    """The number of tokens of the response."""
    session: str | None = None
    """The session, for messages."""
    result: RewardResult = field(init=False)
    """The result of scoring. A sample without an outcome got its score from the agent loop."""

    def __post_init__(self) -> None:
        self.result = RewardResult.of(Reward(reward_score=self.reward, reward_extra_info={**self.info}), self.session)
        if not math.isfinite(self.reward):  # of an agent loop manager that writes its rows itself
            self.reward = 0.0

    @property
    def outcome(self) -> Outcome:
        """The outcome of scoring."""
        return self.result.outcome

    @property
    def is_masked(self) -> bool:
        """Whether the sample is excluded from training."""
        return self.result.masked


@dataclass
class StepRewards:
    """The rewards of all parts of a training step."""

    trajectories: dict[str, TrajectoryReward] = field(default_factory=dict)
    """The trajectories that reached the computation of advantages, by key."""
    trained: set[str] = field(default_factory=set)
    """The keys of the trajectories that have an advantage: they are not masked, and have a baseline."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Metrics in seconds, summed over the parts."""

    def samples(self) -> dict[str, TrajectoryReward]:
        """Return the last output of each session by key: a sample with several outputs counts once."""
        return {key: self.trajectories[key] for key in final_outputs(self.trajectories)}

    def metrics(self) -> dict[str, float]:
        """Return the metrics for verl's logger: outcomes, means of the returned numbers, seconds and attempts.

        ``reward_loop/outage/samples`` waited for a judge that could not be reached, the longest of them for
        ``reward_loop/outage/seconds``.

        Keys may differ between samples: a mean covers the samples that are not masked and have the key.
        """
        samples = self.samples().values()
        outages = [sample.result.outage_s for sample in samples]
        outcomes = Counter(sample.outcome for sample in samples)
        measured: dict[str, list[float]] = defaultdict(list)
        returned: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            for name, value in sample.info.items():
                if name in _MEASURED:
                    measured[name.removeprefix("reward_")].append(value)
                elif sample.is_masked or name in RESERVED_KEYS:
                    continue
                elif (number := finite_number(value)) is not None:
                    returned[name].append(number)
        raw = [sample.info.get("raw_score", sample.reward) for sample in samples if sample.outcome is Outcome.SCORED]
        metrics = {f"reward_loop/{name}/mean": float(np.mean(values)) for name, values in returned.items()}
        metrics |= {f"reward_loop/{outcome}": float(outcomes[outcome]) for outcome in Outcome}
        if raw:
            metrics["reward_loop/raw_score/mean"] = float(np.mean(raw))
        for name, values in measured.items():
            metrics[f"reward_loop/{name}/mean"] = float(np.mean(values))
            metrics[f"reward_loop/{name}/max"] = float(np.max(values))
        metrics["reward_loop/outage/samples"] = float(sum(seconds > 0 for seconds in outages))
        metrics["reward_loop/outage/seconds"] = float(max(outages, default=0.0))
        return metrics | self.seconds


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean, maximum and minimum of some values, under verl's names."""
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": max(values), f"{name}/min": min(values)}


def only_numbers(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Convert numbers, also those of numpy and torch, to floats, and replace all other values with ``None``.

    verl averages everything that is not a string, and would fail on lists and dicts. The strings of ``pred`` stay: verl
    uses them for majority votes.
    """
    return {
        name: [value if name == "pred" and isinstance(value, str) else finite_number(value) for value in values]
        for name, values in columns.items()
    }


def without_baseline(keys: Collection[str], masked: set[str]) -> set[str]:
    """Return the trajectories of sessions that are the only unmasked one of their group.

    verl uses the baseline 0 for a group of one, so their raw score would become the advantage. Groups that had one
    session from the start are not returned.
    """
    members: dict[str, set[str]] = defaultdict(set)
    left: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        session, group = session_of(key)[0], uid_of(key)
        members[group].add(session)
        if key not in masked:
            left[group].add(session)
    lone = {next(iter(sessions)) for group, sessions in left.items() if len(sessions) == 1 < len(members[group])}
    return {key for key in keys if session_of(key)[0] in lone}


def overlap_metrics(step: float, *, generation: float, waiting: float, judged: Sequence[Interval]) -> dict[str, float]:
    """Return the metrics of the seconds of a training step by part, for verl's logger, by name.

    Args:
        step: the whole step, with the weight synchronisation, without checkpoint and validation. Its rest, after
            generation and waiting, is training: log-probabilities, values, advantages, updates, and weights.
        generation: waiting for rollouts.
        waiting: waiting for rewards, while no rollout is missing.
        judged: for each reward of the step, the times of the request and of the arrival. Judging lasts while at least
            one of them is pending, also before the step.
    """
    judging = seconds_of(judged)
    hidden = hidden_share(waiting, judging)
    return {
        "reward_pipeline/generation_s": generation,
        "reward_pipeline/judging_s": judging,
        "reward_pipeline/training_s": step - generation - waiting,
        "reward_pipeline/waiting_for_rewards_s": waiting,
        "reward_pipeline/waiting_share": waiting / step if step else 0.0,
        **({} if hidden is None else {"reward_pipeline/hidden_share": hidden}),
    }
