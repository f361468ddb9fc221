"""The numbers of a training step, and the values that the monitors compute from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from reward_loop._util.intervals import FALSE_ACCEPT, WeightedShare
from reward_loop.audit.counts import ProbeCount


@dataclass(frozen=True)
class JudgeCalls:
    """The requests to judges and model servers since the previous step."""

    calls: int = 0
    without_verdict: int = 0
    """Replies in which a ``Judge`` found no verdict."""
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    """The durations of the requests, or of a part of them."""


@dataclass(frozen=True)
class Observation:
    """The rewards and responses of one training step. All arrays have one entry per sample, in the same order."""

    step: int
    rewards: np.ndarray
    """The rewards after the policy and ``post_process_scores``; NaN for masked samples."""
    groups: np.ndarray
    """The number of the group of each sample."""
    lengths: np.ndarray
    """The lengths of the responses in tokens."""
    scores: np.ndarray
    """The scores that the function returned; NaN for samples without a score."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The other numbers that the function returned, by name; NaN where there is none."""
    unscored: int = 0
    """The number of samples for which the function returned no score."""
    uids: Sequence[str] = ()
    """The uid of each sample in the records."""
    responses: Sequence[np.ndarray] = ()
    """The token IDs of a part of the responses, cut to a maximum length."""
    response_samples: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=int))
    """The index of the sample of each of these responses."""
    judges: JudgeCalls | None = None
    """``None`` if the requests are unknown."""
    probes: Mapping[str, ProbeCount] = field(default_factory=dict)
    """The probes of the judge that ended since the previous step, by kind: ``canary/KIND``, ``again``, ``order``,
    ``frame`` or ``labelled``."""
    reference_pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2)))
    """The score, and the score of the reference judge, of each sample that the reference judge scored since the
    previous step; of shape (n, 2)."""
    reference_uids: Sequence[str] = ()
    """The uid of each of these samples."""

    @property
    def trained(self) -> np.ndarray:
        """A boolean array: whether each sample is unmasked."""
        return np.isfinite(self.rewards)


# --- Rewards

MIN_SAMPLES = 32
"""A correlation of fewer samples is not computed: it would be large by chance."""

KS_COEFFICIENT = 1.95
"""The coefficient of the two-sample Kolmogorov-Smirnov test at the significance level 0.001."""


class Pool(NamedTuple):
    """The rewards of an earlier step."""

    rewards: np.ndarray
    groups: int
    """The number of groups of these samples."""


def zero_variance_groups(rewards: np.ndarray, groups: np.ndarray) -> float | None:
    """Return the share of groups whose rewards are all equal, among the groups with at least two unmasked samples.

    ``None`` if there is no such group.

    Example::

        zero_variance_groups(np.array([1.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]))  # 0.5
    """
    rewards, groups = _unmasked(rewards, groups)
    if not len(rewards):
        return None
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # Not a standard deviation of 0: rounding makes that of equal rewards slightly larger.
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    several = sizes > 1
    return float(np.mean((low == high)[several])) if several.any() else None


def masked_share(rewards: np.ndarray) -> float | None:
    """Return the share of masked samples."""
    return float(np.mean(np.isnan(rewards))) if len(rewards) else None


def length_correlation(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> float | None:
    """Return the Pearson correlation of reward and length, both relative to their means in the group.

    A harder prompt has longer responses and lower rewards; the difference to the group's mean removes that, in the same
    way as the advantage. Groups of one sample are left out. If all groups have one sample, the plain correlation is
    returned. ``None`` if there are fewer than `MIN_SAMPLES` samples, or if all rewards or lengths are equal.
    """
    lengths = lengths[np.isfinite(rewards)].astype(float)
    rewards, groups = _unmasked(rewards, groups)
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if np.any(sizes > 1):
        rewards, lengths = (values - (np.bincount(index, values) / sizes)[index] for values in (rewards, lengths))
        several = sizes[index] > 1
        rewards, lengths = rewards[several], lengths[several]
    if len(rewards) < MIN_SAMPLES or np.std(rewards) < 1e-9 or np.std(lengths) < 1e-9:
        return None
    return float(np.corrcoef(rewards, lengths)[0, 1])


def score_jump(rewards: np.ndarray, groups: np.ndarray, earlier: Sequence[Pool]) -> tuple[float, float] | None:
    """Compare the distribution of a step's rewards with that of earlier steps.

    Returns:
        The Kolmogorov-Smirnov distance, which is the largest difference between the two cumulative distributions; and
        its critical value, which chance exceeds in 0.1 % of comparisons. The samples of a group are not independent, so
        the critical value is that for the numbers of groups. ``None`` without earlier steps or rewards.
    """
    rewards, groups = _unmasked(rewards, groups)
    pooled = np.sort(np.concatenate([np.empty(0), *(pool.rewards for pool in earlier)]))
    if not len(pooled) or not len(rewards):
        return None
    rewards = np.sort(rewards)
    points = np.concatenate([rewards, pooled])
    ours = np.searchsorted(rewards, points, side="right") / len(rewards)
    theirs = np.searchsorted(pooled, points, side="right") / len(pooled)
    n, m = len(np.unique(groups)), sum(pool.groups for pool in earlier)
    return float(np.max(np.abs(ours - theirs))), float(KS_COEFFICIENT * np.sqrt((n + m) / (n * m)))


def _unmasked(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.isfinite(rewards)
    return rewards[kept], groups[kept]


# --- Components and judges

MAX_COMPONENTS = 16
"""With more components, no weights are estimated."""

FIT = 1e-3
"""The largest share of the variance of the scores that the weighted sum of the components may leave unexplained."""

TOP = 0.01
"""A value is at the top if its distance to the largest value of the run is at most this part of the run's range."""

MIN_CALLS = 20
"""With fewer requests, no quantile is computed."""


def weights(scores: np.ndarray, components: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the weight of each component in the score, estimated by least squares. All values must be finite.

    Empty if the score is not a weighted sum of the components, or if fewer than two components vary.
    """
    if not len(scores):
        return {}
    varying = {name: values for name, values in components.items() if np.ptp(values) > 0}
    total = np.var(scores)
    if not 2 <= len(varying) <= MAX_COMPONENTS or len(scores) <= len(varying) or total < 1e-12:
        return {}
    columns = np.stack([values - values.mean() for values in varying.values()], axis=1)
    scale = columns.std(axis=0)  # columns of very different sizes would lose digits
    columns /= scale
    # The normal equations: there are few columns and many rows. Columns that depend on each other share a weight.
    found, *_ = np.linalg.lstsq(columns.T @ columns, columns.T @ (scores - scores.mean()), rcond=1e-9)
    if np.var(scores - columns @ found) > FIT * total:
        return {}
    return dict(zip(varying, (float(weight) for weight in found / scale), strict=True))


def component_share(scores: np.ndarray, components: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the share of each component in the sum of the variances of the weighted components.

    Empty if the components do not add up to the score; see `weights`. Components that are missing for a sample with a
    score are left out.

    Example::

        score = 0.5 * quality + 0.5 * form  # quality varies between 0 and 1, form hardly
        component_share(score, {"quality": quality, "form": form})  # {"quality": 0.99, "form": 0.01}
    """
    scored = np.isfinite(scores)
    whole = {name: values[scored] for name, values in components.items() if np.all(np.isfinite(values[scored]))}
    found = weights(scores[scored], whole)
    variances = {name: float(np.var(weight * whole[name])) for name, weight in found.items()}
    total = sum(variances.values())
    return {name: variance / total for name, variance in variances.items()} if total > 0 else {}


def component_saturation(
    components: Mapping[str, np.ndarray], ranges: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Return the share of samples for which each component is at the top of its range in the run.

    Values may be NaN. A component that never varied is left out.
    """
    found = {}
    for name, values in components.items():
        low, high = ranges.get(name, (0.0, 0.0))
        values = values[np.isfinite(values)]
        if high > low and len(values):
            found[name] = float(np.mean(values >= high - TOP * (high - low)))
    return found


def false_accepts(components: Mapping[str, np.ndarray], uids: Sequence[str]) -> dict[str, ProbeCount]:
    """Return, of the answers that the strong judge of a spot check rejects, how many the cheap judge accepts.

    With chances that differ, such as those of `reward_loop.client.escalate`, answers are weighted with 1 / chance.

    Returns:
        The counts by the name of the function, which is empty without the manager `composite`.
    """
    found = {}
    for name, values in components.items():
        prefix = name.removesuffix(FALSE_ACCEPT)
        if prefix == name or (prefix and not prefix.endswith("/")):
            continue
        share, chances = WeightedShare(), components.get(f"{prefix}chance", np.ones(len(values)))
        selected = np.flatnonzero(np.isfinite(values) & (chances > 0))
        for index in selected:
            share.add(bool(values[index] > 0), float(chances[index]))
        samples = [uids[i] for i in selected if values[i] > 0 and i < len(uids)]
        if share.count:
            found[prefix.rstrip("/")] = ProbeCount(share.count, share.positive, samples)
    return found


def unparsable_verdicts(samples: int, unscored: int, judges: JudgeCalls | None) -> float | None:
    """Return the share of samples without a score, or of judge replies without a verdict if that is larger."""
    if not samples:
        return None
    replies = judges.without_verdict / judges.calls if judges is not None and judges.calls else 0.0
    return max(unscored / samples, replies)


def judge_latency(judges: JudgeCalls | None) -> float | None:
    """Return the 95th percentile of the durations of requests to judges, in seconds."""
    if judges is None or len(judges.seconds) < MIN_CALLS:
        return None
    return float(np.quantile(judges.seconds, 0.95))


# --- Responses, as token IDs

NGRAM = 4

REPETITIVE = 0.5
"""A response is repetitive if more than this share of its 4-grams occurred earlier in it."""

MIN_TOKENS = 16
"""Shorter responses are left out: short answers to a question are often equal and correct."""

_FACTORS = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
"""Odd constants, whose products wrap around; equal sums of different 4-grams are too rare to matter."""


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
    hashes.sort()  # faster here than `np.unique`
    different = 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))
    return 1.0 - different / count


def repetition(responses: Sequence[np.ndarray]) -> float | None:
    """Return the share of repetitive responses; ``None`` if all are shorter than `MIN_TOKENS`."""
    long = [tokens for tokens in responses if len(tokens) >= MIN_TOKENS]
    if not long:
        return None
    return sum(repeated_share(tokens) > REPETITIVE for tokens in long) / len(long)


def identical_responses(responses: Sequence[np.ndarray]) -> float | None:
    """Return the share of responses that are equal to another one; ``None`` if all are shorter than `MIN_TOKENS`."""
    long = [np.ascontiguousarray(tokens).tobytes() for tokens in responses if len(tokens) >= MIN_TOKENS]
    if not long:
        return None
    copies = Counter(long)
    return sum(count for count in copies.values() if count > 1) / len(long)
