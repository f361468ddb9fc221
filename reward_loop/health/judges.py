"""Monitors of judges: replies without a verdict, and latency."""

from __future__ import annotations

import numpy as np

from reward_loop.health.observation import JudgeCalls

__all__ = ["judge_latency", "unparsable_verdicts"]

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
