"""Monitors of the components of the score: one that dominates, one that saturates; and of the judges' verdicts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reward_loop.health.observation import JudgeCalls

__all__ = ["component_saturation", "component_share", "judge_latency", "unparsable_verdicts", "weights"]

MAX_COMPONENTS = 16
"""With more components, no weights are estimated."""

FIT = 1e-3
"""The largest share of the variance of the scores that the weighted sum of the components may leave unexplained."""

TOP = 0.01
"""A value is at the top if its distance to the largest value of the run is at most this part of the run's range."""


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


MIN_CALLS = 20
"""With fewer requests, no quantile is computed."""


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
