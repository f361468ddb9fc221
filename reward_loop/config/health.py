"""The options of the live numbers of a training run, see ``reward_loop/health.py``.

They are declared here, not there: they are a group of `RewardLoopConfig`, and no room of the core imports a satellite.
"""

from __future__ import annotations

from pydantic import Field

from reward_loop.config.parsing import Config

__all__ = ["HealthConfig"]


class HealthConfig(Config):
    """The limits of the live numbers of each training step. ``null`` turns a number off."""

    enabled: bool = True
    """Whether the numbers are computed in a verl run."""

    patience: int = Field(default=3, ge=1)
    """The number of steps in a row beyond the limit after which a warning begins, and within it after which it ends."""

    # At 0.9, only a tenth of the groups gives a signal. In an honest run of the demo, up to 59 % have an equal `acc`.
    zero_variance_groups: float | None = Field(default=0.9, ge=0, le=1)
    """The largest share of groups whose rewards are all equal."""

    # Below the default of `max_failed_share`, which stops the run.
    masked_share: float | None = Field(default=0.2, ge=0, le=1)
    """The largest share of masked samples."""

    no_verdict: float | None = Field(default=0.1, ge=0, le=1)
    """The largest share of judgements without a verdict."""

    # In simulated runs, a judge that rewards length gives 0.5, and one without a bias at most 0.26.
    length_correlation: float | None = Field(default=0.45, ge=0, le=1)
    """The largest absolute correlation of the reward with the response length within groups."""

    repetition: float | None = Field(default=0.1, ge=0, le=1)
    """The largest share of responses that repeat more than half of their 4-grams."""

    # Two fifths of the default of `timeout`: of one judgement in twenty, little of the deadline is left for a retry.
    judge_p95_s: float | None = Field(default=120.0, gt=0)
    """The largest 95th percentile of the seconds of requests to judges."""
