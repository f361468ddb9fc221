"""Monitors of rewards: groups without variance, masked samples, correlation with the length, jumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Pool", "length_correlation", "masked_share", "score_jump", "zero_variance_groups"]

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
    pooled = np.sort(np.concatenate([_NOTHING, *(pool.rewards for pool in earlier)]))
    if not len(pooled) or not len(rewards):
        return None
    rewards = np.sort(rewards)
    points = np.concatenate([rewards, pooled])
    ours = np.searchsorted(rewards, points, side="right") / len(rewards)
    theirs = np.searchsorted(pooled, points, side="right") / len(pooled)
    n, m = len(np.unique(groups)), sum(pool.groups for pool in earlier)
    return float(np.max(np.abs(ours - theirs))), float(KS_COEFFICIENT * np.sqrt((n + m) / (n * m)))


_NOTHING = np.empty(0)


def _unmasked(rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.isfinite(rewards)
    return rewards[kept], groups[kept]
