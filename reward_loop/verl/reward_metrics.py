"""The metrics of the rewards of a training step and of a validation, and the seconds of a step by part.

verl merges the metrics of a step's parts by words such as "sum", "min" and "max" anywhere in a name, and averages
counts. So the metrics here are computed once per step, from all its samples.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reward_loop.records import Interval, hidden_share, seconds_of
from reward_loop.types import MEASURED, RESERVED_KEYS, Outcome, finite_number
from reward_loop.verl.trajectory_keys import final_outputs, session_of, uid_of

Info = Mapping[str, Any]
"""The ``reward_extra_info`` of a trajectory."""

_MEASURED = frozenset(f"reward_{name}" for name in MEASURED) - {"reward_outage_s"}
"""Keys of the values that the reward loop measures for every sample."""


@contextmanager
def added_seconds(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Add the seconds spent in the block to ``seconds[name]``."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - began


@dataclass(frozen=True, slots=True)
class TrajectoryReward:
    """The reward of a trajectory: of one output of a session."""

    info: Info
    reward: float
    """The sum of the rewards of its tokens."""
    raw_score: float
    """The score before ``post_process_scores``."""
    post_processed: bool = False
    """Whether `reward` is a result of ``post_process_scores``."""
    tokens: int = 0
    """The number of tokens of the response."""

    @property
    def outcome(self) -> str:
        """The outcome of scoring. A sample without one got its score from the agent loop."""
        return str(self.info.get("reward_outcome", Outcome.SCORED))

    @property
    def is_scored(self) -> bool:
        """Whether the sample has a score."""
        return self.outcome == Outcome.SCORED

    @property
    def is_masked(self) -> bool:
        """Whether the sample is excluded from training."""
        return bool(self.info.get("reward_masked"))


Rewards = Mapping[str, TrajectoryReward]
"""The rewards of a batch by key of the trajectory."""


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

        Keys may differ between samples: a mean covers the samples that have the key.
        """
        samples = self.samples().values()
        outages = [sample.info.get("reward_outage_s") or 0.0 for sample in samples]
        outcomes = Counter(sample.info.get("reward_outcome") for sample in samples)
        measured: dict[str, list[float]] = defaultdict(list)
        returned: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            for name, value in sample.info.items():
                if name in _MEASURED:
                    measured[name.removeprefix("reward_")].append(value)
                elif name not in RESERVED_KEYS and (number := finite_number(value)) is not None:
                    returned[name].append(number)
        raw = [sample.raw_score for sample in samples if sample.is_scored]
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


def unmasked(scores: Sequence[Any], masked: Sequence[Any] | None) -> list[Any]:
    """Return the scores, with ``None`` for masked samples."""
    masked = [False] * len(scores) if masked is None else masked
    return [None if is_masked else score for score, is_masked in zip(scores, masked, strict=True)]


Prompt = tuple[str, str]
"""The data source and the uid of a prompt."""


def validation_metrics(
    verls: Callable[..., dict[str, float]],
    data_sources: Sequence[Any],
    uids: Sequence[Any],
    columns: Mapping[str, list[Any]],
    turns: Sequence[Any],
    sizes: Mapping[Prompt, int] | None,
) -> dict[str, float]:
    """Return verl's validation metrics, with means over the samples that are not masked and have the value.

    verl averages over each prompt first, and puts the number of values into the name. If some samples of a prompt have
    no score, ``mean@3`` and ``mean@4`` are means over different prompts, and neither is the mean over all samples.
    Here, ``mean@N`` is the mean over all samples of the prompts with ``N`` requested rollouts. verl's metrics for sizes
    that its bootstrap does not use for ``N`` are left out.

    Args:
        verls: verl's function that computes the metrics.
        data_sources: the data source of each sample.
        uids: the uid of each sample's prompt.
        columns: the values that verl collected for each sample: ``reward`` and the keys of ``reward_extra_info``.
        turns: the number of turns of each sample.
        sizes: the number of requested rollouts of each prompt. Failed rollouts count as ``acc`` 0, as in verl.
    """
    prompts = [(str(source), str(uid)) for source, uid in zip(data_sources, uids, strict=True)]
    sizes = Counter(prompts) | Counter(sizes)
    numbers = only_numbers(columns)
    numbers["reward"] = unmasked(numbers["reward"], columns.get("reward_masked"))
    acc = numbers.get("acc") or [None] * len(prompts)
    # verl treats a sample without `acc` as a failed rollout, and counts 0 for it.
    expected = sizes - Counter(prompt for prompt, value in zip(prompts, acc, strict=True) if value is None)
    metrics = verls(data_sources, uids, numbers, turns, expected_acc_counts=expected)
    outcomes = Counter(columns.get("reward_outcome", ()))
    return {
        **_of_whole_prompts(metrics, sizes),
        **_means(numbers, prompts, sizes),
        **{f"val-aux/reward_outcome/{outcome}": float(outcomes[outcome]) for outcome in Outcome if any(outcomes)},
    }


def _means(numbers: Mapping[str, Sequence[Any]], prompts: Sequence[Prompt], sizes: Counter[Prompt]) -> dict[str, float]:
    samples = [
        (prompt, name, value)
        for name, column in numbers.items()
        for prompt, value in zip(prompts, column, strict=True)
        if isinstance(value, float)
    ]
    of_acc = [(prompt, value) for prompt, name, value in samples if name == "acc"]
    with_acc = {source for (source, _), _ in of_acc}
    samples += [(prompt, "acc_success_only", value) for prompt, value in of_acc]
    failed_rollouts = sizes - Counter(prompts)
    samples += [(prompt, "acc", 0.0) for prompt in failed_rollouts.elements() if prompt[0] in with_acc]
    values: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for prompt, name, value in samples:
        values[prompt[0], name, sizes[prompt]].append(value)
    largest = _largest(sizes)
    means = {}
    for (source, name, size), of_size in values.items():
        core = name == ("acc" if source in with_acc else "reward") and size == largest[source]
        means[f"val-{'core' if core else 'aux'}/{source}/{name}/mean@{size}"] = float(np.mean(of_size))
    return means


def _of_whole_prompts(metrics: Mapping[str, float], sizes: Mapping[Prompt, int]) -> dict[str, float]:
    """Return verl's metrics without its means, and without sizes that occur only for prompts with masked samples."""
    largest = _largest(sizes)
    # The longest first: the name of a source may begin with that of another, as "math" and "math/hard" do.
    sources = "|".join(re.escape(source) for source in sorted(largest, key=len, reverse=True))
    name = re.compile(rf"val-(core|aux)/(({sources})/.+)/((mean|std|best|worst|maj)@(\d+)(?:/(?:mean|std))?)")
    kept = {}
    for metric, value in metrics.items():
        found = name.fullmatch(metric)
        if found is None:
            kept[metric] = value
            continue
        section, variable, source, statistic, kind, size = *found.groups()[:5], int(found[6])
        whole = {n for (of, _), n in sizes.items() if of == source}
        # verl's bootstrap draws 2, 4, 8, ... values of a prompt, and all of them.
        drawn = kind != "std" and size & (size - 1) == 0 and size < largest[source]
        if kind != "mean" and (size in whole or drawn):
            kept[f"val-{section if size == largest[source] else 'aux'}/{variable}/{statistic}"] = value
    return kept


def _largest(sizes: Mapping[Prompt, int]) -> dict[str, int]:
    """Return the largest number of rollouts of a prompt, by data source."""
    largest: dict[str, int] = {}
    for (source, _), size in sizes.items():
        largest[source] = max(size, largest.get(source, 0))
    return largest


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


def judging_s(judged: Sequence[Interval]) -> float:
    """Estimate how many seconds judging takes alone, for the rewards of a step.

    The estimate assumes that all these rewards are requested at once. A reward counts in the step that trains on it,
    with all the seconds since its request, including those before the step. Judging takes as long as the slowest of
    these rewards, or longer if judges return a limited number of rewards a second. That rate is taken from the shortest
    time in which half of the rewards arrived. The result is at most the time during which at least one of these rewards
    was pending. Times in which judges are idle, or only a few of them work, do not count.

    Args:
        judged: for each reward, the times of the request and of the arrival.
    """
    if not judged:
        return 0.0
    longest = max(arrived - requested for requested, arrived in judged)
    arrivals = sorted(arrived for _, arrived in judged)
    half = len(arrivals) // 2
    if not half:
        return longest
    fastest = min(later - sooner for sooner, later in zip(arrivals, arrivals[half:], strict=False))
    return min(seconds_of(judged), max(longest, fastest * len(arrivals) / half))


def overlap_metrics(step: float, *, generation: float, waiting: float, judged: Sequence[Interval]) -> dict[str, float]:
    """Return the metrics of the seconds of a training step by part, for verl's logger, by name.

    Args:
        step: the whole step, with the weight synchronisation, without checkpoint and validation. Its rest, after
            generation and waiting, is training: log-probabilities, values, advantages, updates, and weights.
        generation: waiting for rollouts.
        waiting: waiting for rewards, while no rollout is missing.
        judged: for each reward of the step, the times of the request and of the arrival.
    """
    judging, pending = judging_s(judged), seconds_of(judged)
    hidden = hidden_share(waiting, pending)
    # The step if all judging were hidden. Judging that began before the step counts at most as long as the step.
    floor = max(step - waiting, min(judging, step))
    return {
        "reward_pipeline/generation_s": generation,
        "reward_pipeline/judging_s": judging,
        "reward_pipeline/pending_s": pending,
        "reward_pipeline/training_s": step - generation - waiting,
        "reward_pipeline/waiting_for_rewards_s": waiting,
        "reward_pipeline/waiting_share": waiting / step if step else 0.0,
        **({} if hidden is None else {"reward_pipeline/hidden_share": hidden}),
        "reward_pipeline/floor_s": floor,
        "reward_pipeline/over_floor": step / floor - 1 if floor else 0.0,
    }
