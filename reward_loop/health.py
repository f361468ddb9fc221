"""The live numbers of a training run: six values of each step, and `HealthWatch`, which compares them with limits.

Invariants:

- Nothing here is in the path of a sample: a trainer passes the numbers of a step that has ended.
- The values depend on the step alone. What is remembered is for how many steps in a row a value was beyond its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reward_loop.config import HealthConfig

MIN_SAMPLES = 32
"""A correlation of fewer samples is not computed: it would be large by chance."""

MIN_CALLS = 20
"""With fewer requests, no quantile is computed."""

NGRAM = 4

REPETITIVE = 0.5
"""A response is repetitive if more than this share of its 4-grams occurred earlier in it."""

MIN_TOKENS = 16
"""Shorter responses are not examined for repetition."""

_FACTORS = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
"""Odd constants, whose products wrap around; equal sums of different 4-grams are too rare to matter."""


@dataclass(frozen=True)
class StepNumbers:
    """The rewards, responses and judge requests of one training step. Arrays have one entry per sample."""

    step: int
    rewards: np.ndarray
    """NaN for masked samples."""
    groups: np.ndarray
    """The number of the group of each sample."""
    lengths: np.ndarray
    """The lengths of the responses in tokens."""
    unscored: int = 0
    """The number of samples for which the function returned no score."""
    responses: Sequence[np.ndarray] = ()
    """The token IDs of a part of the responses."""
    calls: int = 0
    """The number of requests to judges since the previous step; 0 also if it is unknown."""
    without_verdict: int = 0
    """The replies among them in which a `Judge` found no verdict."""
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    """The durations of these requests, or of a part of them."""


def zero_variance_groups(step: StepNumbers) -> float | None:
    """Return the share of groups whose rewards are all equal, among the groups with at least two unmasked samples."""
    kept = np.isfinite(step.rewards)
    _, index, sizes = np.unique(step.groups[kept], return_inverse=True, return_counts=True)
    # Not a standard deviation of 0: rounding makes that of equal rewards slightly larger.
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, index, step.rewards[kept])
    np.maximum.at(high, index, step.rewards[kept])
    several = sizes > 1
    return float(np.mean((low == high)[several])) if several.any() else None


def masked_share(step: StepNumbers) -> float | None:
    """Return the share of masked samples."""
    return float(np.mean(np.isnan(step.rewards))) if len(step.rewards) else None


def no_verdict(step: StepNumbers) -> float | None:
    """Return the share of unscored samples, or of judge replies without a verdict if that is larger."""
    if not len(step.rewards):
        return None
    return max(step.unscored / len(step.rewards), step.without_verdict / step.calls if step.calls else 0.0)


def length_correlation(step: StepNumbers) -> float | None:
    """Return the Pearson correlation of reward and length, both relative to their means in the group.

    A harder prompt has longer responses and lower rewards; the difference to the group's mean removes that, in the same
    way as the advantage. Groups of one sample are left out. If all groups have one sample, the plain correlation is
    returned. ``None`` if there are fewer than `MIN_SAMPLES` samples, or if all rewards or lengths are equal.
    """
    kept = np.isfinite(step.rewards)
    rewards, lengths = step.rewards[kept], step.lengths[kept].astype(float)
    _, index, sizes = np.unique(step.groups[kept], return_inverse=True, return_counts=True)
    if np.any(sizes > 1):
        rewards, lengths = (values - (np.bincount(index, values) / sizes)[index] for values in (rewards, lengths))
        several = sizes[index] > 1
        rewards, lengths = rewards[several], lengths[several]
    if len(rewards) < MIN_SAMPLES or np.std(rewards) < 1e-9 or np.std(lengths) < 1e-9:
        return None
    return float(np.corrcoef(rewards, lengths)[0, 1])


def repeated_share(tokens: np.ndarray) -> float:
    """Return the share of a response's 4-grams that occurred earlier in it (``seq-rep-4`` of Welleck et al.).

    Example::

        repeated_share(np.array([1, 2, 3, 4, 1, 2, 3, 4]))  # 0.2: one of five
    """
    count = len(tokens) - NGRAM + 1
    if count <= 0:
        return 0.0
    ids = np.asarray(tokens).astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for place, factor in enumerate(_FACTORS):
        hashes += ids[place : place + count] * factor
    return 1.0 - len(np.unique(hashes)) / count


def repetition(step: StepNumbers) -> float | None:
    """Return the share of repetitive responses; ``None`` if all are shorter than `MIN_TOKENS`."""
    shares = [repeated_share(tokens) for tokens in step.responses if len(tokens) >= MIN_TOKENS]
    return sum(share > REPETITIVE for share in shares) / len(shares) if shares else None


def judge_p95_s(step: StepNumbers) -> float | None:
    """Return the 95th percentile of the seconds of requests to judges."""
    return float(np.quantile(step.seconds, 0.95)) if len(step.seconds) >= MIN_CALLS else None


class _Number(NamedTuple):
    value: Callable[[StepNumbers], float | None]
    message: str
    """The warning, with the fields ``value`` and ``limit``."""


# No name contains `max`, `min`, `sum`, `mean` or `std`: by these words, verl chooses how it aggregates a metric.
NUMBERS = {
    "zero_variance_groups": _Number(
        zero_variance_groups,
        "{value:.0%} of the groups have equal rewards, so their samples have no advantage (limit {limit:.0%}). Compare "
        "the rewards and responses of these groups: the task may be too easy or too hard, or the judge may give the "
        "same score to all responses",
    ),
    "masked_share": _Number(
        masked_share,
        "{value:.0%} of the samples are masked (limit {limit:.0%}). Look at the errors of samples without a score "
        "(`outcome` and `error` in the records)",
    ),
    "no_verdict": _Number(
        no_verdict,
        "{value:.0%} of the judgements have no verdict (limit {limit:.0%}). Read the judge's replies without a verdict "
        "(`unscored` in the exchanges of the records): they may be cut off, or responses may address the judge",
    ),
    "length_correlation": _Number(
        length_correlation,
        "the reward has a correlation of {value:+.2f} with the response length (limit {limit:.2f} in both directions). "
        "Compare the longest and the shortest responses of a group: the reward may depend on the length only",
    ),
    "repetition": _Number(
        repetition,
        "{value:.0%} of the responses repeat more than half of their 4-grams (limit {limit:.0%}). Read the longest "
        "responses with a high reward",
    ),
    "judge_p95_s": _Number(
        judge_p95_s,
        "95% of the requests to judges take up to {value:.3g} s (limit {limit:.3g} s). Look at the load and the logs "
        "of the judge's servers, and at the lengths of requests and replies",
    ),
}
"""The live numbers, by the name of their metric and of the option with the limit."""


class HealthWatch:
    """Compares the numbers of each training step with their limits. Steps without a value change nothing.

    Example::

        watch = HealthWatch(HealthConfig(masked_share=0.1))
        values, warnings = watch.check(step)
    """

    def __init__(self, options: HealthConfig) -> None:
        self._patience = options.patience
        self._limits = {name: limit for name in NUMBERS if (limit := getattr(options, name)) is not None}
        self._recent: dict[str, deque[int | None]] = {name: deque(maxlen=options.patience) for name in self._limits}
        """For each number, its latest values: the step of one beyond the limit, ``None`` for one within it."""
        self._active: set[str] = set()

    @property
    def active(self) -> int:
        """The number of warnings that have begun and not ended."""
        return len(self._active)

    def check(self, step: StepNumbers) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the numbers of the next step that have a value, and the warnings that begin with it.

        A warning has the fields of its record: ``step`` and ``since``, the first of the steps in a row beyond the
        limit; ``monitor``, the name of the number; ``value``, ``threshold`` and a ``message``.
        """
        values: dict[str, float] = {}
        warnings: list[dict[str, Any]] = []
        for name, limit in self._limits.items():
            if (value := NUMBERS[name].value(step)) is None:
                continue
            values[name] = value
            recent = self._recent[name]
            recent.append(step.step if abs(value) > limit else None)
            if set(recent) == {None}:
                self._active.discard(name)
            since = recent[0]
            if None not in recent and since is not None and len(recent) == self._patience and name not in self._active:
                self._active.add(name)
                when = f"In step {step.step}" if since == step.step else f"Since step {since}"
                message = f"{when}, {NUMBERS[name].message.format(value=value, limit=limit)}."
                found = {"step": step.step, "monitor": name, "message": message}
                warnings.append({**found, "value": value, "threshold": limit, "since": since})
        return values, warnings
