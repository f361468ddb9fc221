"""The monitor of the reference: a measure of the quality of samples that the reward does not depend on.

The reference is a number that the function returns beside the score, or the score of a reference judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reward_loop.audit.values import Observation

JUDGE = "reference judge"
"""The name of the scores in ``Observation.reference_pairs``."""

STANDARD_ERRORS = 3.0
"""A rise is real if it is larger than this number of its standard errors. In 40,000 simulated steps with 26 samples
each, in part with a policy that improves, chance gave one warning."""

PART = 0.5
"""A gap is real if it is larger than this part of the rise of the reward. In standard deviations, a noisy reference
rises less than the reward, even if both measure the same."""

MOST_SAMPLES = 5


class StepMeans(NamedTuple):
    """The rewards and the references of a step."""

    means: np.ndarray
    """The mean reward and the mean reference."""
    deviations: np.ndarray
    """Their standard deviations."""
    noise: float
    """The standard error of the difference of both means, each in its standard deviations."""


class Divergence(NamedTuple):
    """How reward and reference developed over a window of steps."""

    rises: tuple[float, float]
    """The rises of the mean reward and of the mean reference, by their regression lines."""
    gap: float
    """The rise of the reward minus that of the reference, each in standard deviations of the samples of a step."""
    is_real: bool
    """Whether the rise of the reward and the gap are real, and the gap is larger than `PART` of this rise."""


def step_means(observation: Observation, name: str) -> StepMeans | None:
    """Return the means of a step over the samples with a reward and a reference; ``None`` without such samples."""
    values = observation.reference_pairs if name == JUDGE else _rewards_and_references(observation, name)
    values = values[np.isfinite(values).all(axis=1)]
    if not len(values):
        return None
    deviations = values.std(axis=0)
    noise = (values / np.maximum(deviations, 1e-9)).T
    return StepMeans(values.mean(axis=0), deviations, float(np.std(noise[0] - noise[1]) / np.sqrt(len(values))))


def rises(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rise of each column over the rows, by a regression line, and the standard error of each rise.

    The noise comes from the distances of the rows to the line.
    """
    times = np.arange(len(values)) - (len(values) - 1) / 2
    squares = times @ times
    slopes = times @ values / squares
    noise = values - values.mean(axis=0) - np.outer(times, slopes)
    last = len(values) - 1
    return slopes * last, last * np.sqrt((noise**2).sum(axis=0) / (len(values) - 2) / squares)


def divergence(steps: Sequence[StepMeans]) -> Divergence | None:
    """Compare the rises of reward and reference over at least three steps.

    The noise that both have in common, such as harder prompts in a step, is not in that of the gap. The error of the
    gap is at least that of its samples: the distances of a few steps to their line can be small by chance. ``None`` if
    a number never varies.
    """
    means = np.array([step.means for step in steps])
    scale = np.sqrt(np.mean([step.deviations**2 for step in steps], axis=0))
    if not np.all(scale > 1e-9):
        return None
    reward, reference = (means / scale).T
    found, errors = rises(np.stack([reward, reference, reward - reference], axis=1))
    times = np.arange(len(steps)) - (len(steps) - 1) / 2
    noise = np.sqrt(np.mean([step.noise**2 for step in steps]))
    errors[2] = max(errors[2], (len(steps) - 1) * noise / np.sqrt(times @ times))
    is_real = found[0] > STANDARD_ERRORS * errors[0] and found[2] > STANDARD_ERRORS * errors[2]
    return Divergence(
        rises=(float(found[0] * scale[0]), float(found[1] * scale[1])),
        gap=float(found[2]),
        is_real=bool(is_real and found[2] > PART * found[0]),
    )


def judged_too_high(observation: Observation, name: str) -> list[str]:
    """Return the uids of samples that the reward rates higher than the reference, those with the largest gaps first.

    With a reference judge, the gap is that of both scores, each in standard deviations from its mean. Otherwise, it is
    the reward of samples whose reference is below the step's mean, one of each group.
    """
    if name == JUDGE:
        pairs = observation.reference_pairs
        scaled = (pairs - pairs.mean(axis=0)) / np.maximum(pairs.std(axis=0), 1e-9)
        gaps = scaled[:, 0] - scaled[:, 1]
        worst = [observation.reference_uids[i] for i in np.argsort(-gaps, kind="stable") if gaps[i] > 0]
        return list(dict.fromkeys(worst))[:MOST_SAMPLES]
    rewards, references = _rewards_and_references(observation, name).T
    low = np.flatnonzero(np.isfinite(rewards) & (references < _mean(references)))
    found: dict[int, str] = {}
    for index in low[np.argsort(-rewards[low], kind="stable")]:
        found.setdefault(int(observation.groups[index]), observation.uids[index])
    return list(found.values())[:MOST_SAMPLES]


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else np.nan


def _rewards_and_references(observation: Observation, name: str) -> np.ndarray:
    """Return the reward and the reference of each sample; NaN where there is none."""
    missing = np.full(len(observation.rewards), np.nan)
    return np.stack([observation.rewards, observation.components.get(name, missing)], axis=1)
