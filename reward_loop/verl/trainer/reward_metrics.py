"""The metrics of the rewards of a training step and of a validation, the seconds of a step by part, the live numbers.

verl merges the metrics of a step's parts by words such as "sum", "min" and "max" anywhere in a name, and averages
counts. So the metrics here are computed once per step, from all its samples.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reward_loop.config import RewardLoopConfig
from reward_loop.health import HealthWatch, StepNumbers
from reward_loop.records import HealthRecords, Interval, hidden_share, seconds_of
from reward_loop.types import MEASURED, RESERVED_KEYS, Outcome, finite_number
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.samples import final_outputs, session_of, uid_of
from reward_loop.verl.tq_rows import TrajectoryReward, read_rows

logger = logging.getLogger(__name__)

_MEASURED = frozenset(f"reward_{name}" for name in MEASURED) - {"reward_outage_s"}
"""Keys of the values that the reward loop measures for every sample."""

SAMPLED_RESPONSES = 256
"""The largest number of responses of a step that are examined for repetition."""

SAMPLED_TOKENS = 2048
"""The largest number of tokens of a response that are examined: its last ones."""


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
        outcomes = Counter(sample.result.outcome for sample in samples)
        measured: dict[str, list[float]] = defaultdict(list)
        returned: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            for name in _MEASURED & sample.info.keys():
                measured[name.removeprefix("reward_")].append(sample.info[name])
            for name in () if sample.result.masked else sample.info.keys() - RESERVED_KEYS:
                if (number := finite_number(sample.info[name])) is not None:
                    returned[name].append(number)
        raw = [sample.info.get("raw_score", sample.reward) for sample in samples if sample.result.score is not None]
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


def advantages(rewards: StepRewards) -> dict[str, float | None]:
    """Return the advantage of each sample in the batch of a step by uid; ``None`` if it is not trained on.

    The advantage is the mean over the tokens that are trained on.
    """
    keys = final_outputs(rewards.trained)
    columns = read_rows(keys, "train", "advantages", "response_mask")
    found: dict[str, float | None] = {session_of(key)[0]: None for key in final_outputs(rewards.trajectories)}
    for key, (values, mask) in zip(keys, columns, strict=True):
        trained = values[mask.bool()]
        found[session_of(key)[0]] = float(trained.mean()) if len(trained) else None
    return found


class StepHealth:
    """Computes the live numbers of each training step. Without records, those of judges have no values.

    The reward workers count the requests to judges.

    Args:
        options: the options of the run.
        job: what is true of the whole job.
    """

    def __init__(self, options: RewardLoopConfig, job: RunningJob) -> None:
        self._options = options
        self._job = job
        self._watch = HealthWatch(options.health)
        self._records = HealthRecords(options.log_dir) if options.log_dir else None

    def metrics(self, step: int, rewards: StepRewards) -> dict[str, float]:
        """Return the numbers of a step, and log and record the warnings that begin with it.

        An error is logged, and does not stop the run.
        """
        if not self._options.health.enabled or not rewards.trajectories:
            return {}
        try:
            values, warnings = self._watch.check(self._numbers(step, rewards))
        except Exception:  # observability must not stop a run
            logger.exception("the numbers of reward_loop.health failed in step %d", step)
            return {}
        where = f" Records: {self._options.log_dir}." if self._options.log_dir else ""
        for warning in warnings:
            logger.warning("reward_loop.health.%s: %s%s", warning["monitor"], warning["message"], where)
        if self._records is not None:
            self._records.write_values(step, values)
            self._records.write_warnings(warnings)
        metrics = {f"reward_loop/health/{name}": value for name, value in values.items()}
        return metrics | {"reward_loop/health/warnings": float(self._watch.active)}

    def flush(self) -> None:
        """Wait until all values and warnings are in the records, at most ten seconds."""
        if self._records is not None:
            self._records.flush()

    def _numbers(self, step: int, rewards: StepRewards) -> StepNumbers:
        by_key = rewards.samples()
        keys, samples = list(by_key), list(by_key.values())
        _, groups = np.unique([uid_of(key) for key in keys], return_inverse=True)
        sampled = keys[:: math.ceil(len(keys) / SAMPLED_RESPONSES)]
        counts = self._job.exchange_counts()
        return StepNumbers(
            step=step,
            rewards=np.array([np.nan if sample.result.masked else sample.reward for sample in samples]),
            groups=groups,
            lengths=np.array([sample.tokens for sample in samples]),
            unscored=sum(sample.result.outcome == Outcome.UNSCORED for sample in samples),
            responses=[row.numpy()[-SAMPLED_TOKENS:] for (row,) in read_rows(sampled, "train", "responses")],
            calls=counts["calls"],
            without_verdict=counts["without_verdict"],
            seconds=np.array(counts["seconds"], dtype=float),
        )
