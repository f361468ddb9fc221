"""The table of monitors: the values, the limit and the text of the warning of each; and the monitor of the reference.

The reference is a number that measures the quality of a sample independently of the reward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reward_loop.config import HealthConfig
from reward_loop.health.values import (
    Observation,
    Pool,
    component_saturation,
    component_share,
    identical_responses,
    judge_latency,
    length_correlation,
    masked_share,
    repetition,
    score_jump,
    unparsable_verdicts,
    zero_variance_groups,
)

__all__ = ["MONITORS", "History", "Monitor", "Reading"]

STANDARD_ERRORS = 3.0
"""A rise is real if it is larger than this number of its standard errors. In simulated runs without a trend, with the
default window, chance gives about one warning in 15,000 steps."""

NO_RISE = 2.0
"""The reference does not rise if its rise is smaller than this number of its standard errors."""

MOST_SAMPLES = 5


class _StepMeans(NamedTuple):
    """The rewards and the references of a step."""

    means: np.ndarray
    """The mean reward and the mean reference."""
    deviations: np.ndarray
    """Their standard deviations."""


class _Divergence(NamedTuple):
    """How reward and reference developed over a window of steps."""

    rises: tuple[float, float]
    """The rises of the mean reward and of the mean reference, by their regression lines."""
    gap: float
    """The rise of the reward minus that of the reference, each in standard deviations of the samples of a step."""
    error: float
    """The gap must be larger than this to be real."""
    is_contrary: bool
    """Whether the reward really rises, and the reference by less than `NO_RISE` standard errors."""


def _step_means(observation: Observation, name: str) -> _StepMeans | None:
    """Return the means of a step over the unmasked samples with a reference; ``None`` without such samples."""
    values = _rewards_and_references(observation, name)
    values = values[np.isfinite(values).all(axis=1)]
    return _StepMeans(values.mean(axis=0), values.std(axis=0)) if len(values) else None


def _divergence(steps: Sequence[_StepMeans]) -> _Divergence | None:
    """Compare the rises of reward and reference over at least three steps.

    The noise of a rise comes from the distances of the steps to their regression line. The noise that both have in
    common, such as harder prompts in a step, is not in that of the gap. ``None`` if a number never varies.
    """
    means = np.array([step.means for step in steps])
    scale = np.sqrt(np.mean([step.deviations**2 for step in steps], axis=0))
    if not np.all(scale > 1e-9):
        return None
    reward, reference = (means / scale).T
    values = np.stack([reward, reference, reward - reference], axis=1)
    times = np.arange(len(steps)) - (len(steps) - 1) / 2
    slopes = times @ values / (times @ times)
    noise = values - values.mean(axis=0) - np.outer(times, slopes)
    last = len(steps) - 1
    rises = slopes * last
    errors = last * np.sqrt((noise**2).sum(axis=0) / (len(steps) - 2) / (times @ times))
    return _Divergence(
        rises=(float(rises[0] * scale[0]), float(rises[1] * scale[1])),
        gap=float(rises[2]),
        error=float(STANDARD_ERRORS * errors[2]),
        is_contrary=bool(rises[0] > STANDARD_ERRORS * errors[0] and rises[1] <= NO_RISE * errors[1]),
    )


def _judged_too_high(observation: Observation, name: str) -> list[str]:
    """Return the uids of samples with a reference below the step's mean and the highest rewards, one of a group."""
    rewards, references = _rewards_and_references(observation, name).T
    low = np.flatnonzero(np.isfinite(rewards) & (references < np.nanmean(references)))
    found: dict[int, str] = {}
    for index in low[np.argsort(-rewards[low], kind="stable")]:
        found.setdefault(int(observation.groups[index]), observation.uids[index])
    return list(found.values())[:MOST_SAMPLES]


def _rewards_and_references(observation: Observation, name: str) -> np.ndarray:
    """Return the reward and the reference of each sample; NaN where there is none."""
    missing = np.full(len(observation.rewards), np.nan)
    return np.stack([observation.rewards, observation.components.get(name, missing)], axis=1)


# --- The table

NEW = 0.8
"""A component that was already above this share in the baseline steps is not reported as dominating or saturated."""


class Reading(NamedTuple):
    """The value of a monitor in one step."""

    value: float
    floor: float = 0.0
    """The smallest limit for this value, whatever the threshold."""
    detail: str = ""
    """What else the warning says about the value."""
    samples: Sequence[str] = ()
    """The uids of samples that show it."""


class History:
    """The values of earlier steps that the monitors need, and the options that they depend on."""

    def __init__(self, options: HealthConfig) -> None:
        self.pools: deque[Pool] = deque(maxlen=options.baseline_steps)
        self.reference = options.reference
        self.means: deque[_StepMeans] = deque(maxlen=options.reference_window)
        self.ranges: dict[str, tuple[float, float]] = {}
        """The smallest and the largest value of each component in the run."""

    def add(self, observation: Observation) -> None:
        """Add a step, after it was read."""
        trained = observation.trained
        if trained.any():
            groups = len(np.unique(observation.groups[trained]))
            self.pools.append(Pool(observation.rewards[trained], groups))

    def widen(self, components: Mapping[str, np.ndarray]) -> None:
        """Extend the ranges by the values of a step, before it is read."""
        for name, values in components.items():
            values = values[np.isfinite(values)]
            if len(values):
                low, high = self.ranges.get(name, (math.inf, -math.inf))
                self.ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))


Limit = Callable[[float, float | None], float]
"""Returns the largest healthy value, from the threshold and the baseline (``None`` before it is known)."""


def _fixed(threshold: float, baseline: float | None) -> float:
    return threshold


def _new(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None or baseline > min(NEW, threshold) else threshold


def _added(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None else baseline + threshold


def _times(threshold: float, baseline: float | None) -> float:
    return math.inf if baseline is None else baseline * threshold


@dataclass(frozen=True)
class Monitor:
    """One monitor. Its name is also that of its option, with the threshold, and of its metric."""

    name: str
    read: Callable[[Observation, History], Mapping[str, Reading]]
    """Returns the values of a step by subject: the name of a component, or an empty text if there is only one."""
    limit: Limit
    seen: str
    """The first part of the warning, with the fields ``value``, ``limit``, ``baseline``, ``subject`` and
    ``detail``."""
    look: str
    """The second part of the warning: where to look."""
    is_event: bool = False
    """Whether one step is enough for a warning. Otherwise, ``patience`` steps in a row are needed."""


def _one(value: float | None) -> dict[str, Reading]:
    return {} if value is None else {"": Reading(value)}


def _each(values: Mapping[str, float]) -> dict[str, Reading]:
    return {name: Reading(value) for name, value in values.items()}


def _gap(step: Observation, history: History) -> dict[str, Reading]:
    name = history.reference
    means = None if name is None else _step_means(step, name)
    if name is None or means is None:
        return {}
    history.means.append(means)
    if len(history.means) < (history.means.maxlen or 0) or (found := _divergence(history.means)) is None:
        return {}
    if not found.is_contrary:
        return {name: Reading(found.gap, floor=math.inf)}
    reward, reference = found.rises
    detail = f"{reward:+.3g} for the reward, {reference:+.3g} for the reference, over {len(history.means)} steps"
    return {name: Reading(found.gap, found.error, detail, _judged_too_high(step, name))}


def _jump(step: Observation, history: History) -> dict[str, Reading]:
    found = score_jump(step.rewards, step.groups, history.pools)
    return {} if found is None else {"": Reading(*found)}


MONITORS = (
    Monitor(
        "zero_variance_groups",
        lambda step, _: _one(zero_variance_groups(step.rewards, step.groups)),
        _fixed,
        "{value:.0%} of the groups have equal rewards, so their samples have no advantage (limit {limit:.0%})",
        "Compare the rewards and responses of these groups: the task may be too easy or too hard, or the judge may "
        "give the same score to all responses",
    ),
    Monitor(
        "masked_share",
        lambda step, _: _one(masked_share(step.rewards)),
        _fixed,
        "{value:.0%} of the samples are masked (limit {limit:.0%})",
        "Look at the errors of samples without a score (`outcome` and `error` in the records)",
    ),
    Monitor(
        "component_share",
        lambda step, _: _each(component_share(step.scores, step.components)),
        _new,
        "the component {subject!r} now makes up {value:.0%} of the variance of the score (limit {limit:.0%}; "
        "{baseline:.0%} in the first steps)",
        "Compare responses with a high and a low {subject!r}: the other components have almost no influence any more",
    ),
    Monitor(
        "component_saturation",
        lambda step, history: _each(component_saturation(step.components, history.ranges)),
        _new,
        "{value:.0%} of the samples have the largest value of the component {subject!r} (limit {limit:.0%}; "
        "{baseline:.0%} in the first steps)",
        "Read responses with the largest {subject!r}: the task may be solved, or the policy may exploit the component",
    ),
    Monitor(
        "length_correlation",
        lambda step, _: _one(length_correlation(step.rewards, step.groups, step.lengths)),
        _fixed,
        "the reward has a correlation of {value:+.2f} with the response length (limit {limit:.2f} in both directions)",
        "Compare the longest and the shortest responses of a group: the reward may depend on the length only",
    ),
    Monitor(
        "repetition",
        lambda step, _: _one(repetition(step.responses)),
        _fixed,
        "{value:.0%} of the responses repeat more than half of their 4-grams (limit {limit:.0%})",
        "Read the longest responses with a high reward",
    ),
    Monitor(
        "identical_responses",
        lambda step, _: _one(identical_responses(step.responses)),
        _fixed,
        "{value:.0%} of the responses are identical to another one (limit {limit:.0%})",
        "Read the most frequent response and its rewards: the policy may have collapsed to it",
    ),
    Monitor(
        "unparsable_verdicts",
        lambda step, _: _one(unparsable_verdicts(len(step.rewards), step.unscored, step.judges)),
        _added,
        "{value:.0%} of the judgements have no verdict (limit {limit:.0%}; {baseline:.0%} in the first steps)",
        "Read the judge's replies without a verdict (`unscored` in the exchanges of the records): they may be cut off, "
        "or responses may address the judge",
    ),
    Monitor(
        "judge_latency",
        lambda step, _: _one(judge_latency(step.judges)),
        _times,
        "95% of the requests to judges take up to {value:.3g} s (limit {limit:.3g} s; {baseline:.3g} s in the first "
        "steps)",
        "Look at the load and the logs of the judge's servers, and at the lengths of requests and replies",
    ),
    Monitor(
        "reference_gap",
        _gap,
        _fixed,
        "the reward rises, but the reference {subject!r} does not: {detail}; the gap grew by {value:.2f} standard "
        "deviations (limit {limit:.2f})",
        "Read samples with a high reward and a low {subject!r}: the policy may exploit the reward",
    ),
    Monitor(
        "score_jump",
        _jump,
        _fixed,
        "the distribution of rewards differs from that of the steps before by {value:.2f} (Kolmogorov-Smirnov "
        "distance; limit {limit:.2f})",
        "Compare the responses with the highest rewards before and after: the policy may have found an exploit, or "
        "the judge may have changed",
        is_event=True,
    ),
)
"""All monitors."""
