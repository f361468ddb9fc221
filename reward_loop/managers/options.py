"""The options of the managers, and `RewardLoopConfig`, which puts the options of all rooms together."""

from __future__ import annotations

from pydantic import Field

from reward_loop.config import Config, HealthConfig
from reward_loop.scoring.options import ScoringOptions
from reward_loop.types import Policy


class BatchConfig(Config):
    """How the manager ``batch`` collects samples."""

    max_batch_size: int = Field(default=64, ge=1)
    """The largest number of samples in one call of the function."""

    max_wait_ms: float = Field(default=10.0, ge=0)
    """The longest time in milliseconds that a sample waits for other samples of its call."""


class GroupConfig(Config):
    """How the manager ``group`` collects the samples of a prompt."""

    size: int | None = Field(default=None, ge=1)
    """The number of samples in a group, for samples without a ``group_size``. By default verl's
    ``actor_rollout_ref.rollout.n``."""

    timeout: float = Field(default=600.0, gt=0)
    """Seconds without a sample of a group that is being scored, after which the samples that wait for the others fail;
    only if the caller does not report lost samples, such as verl's own reward loop."""


class RewardLoopConfig(ScoringOptions):
    """How samples are scored, and what happens to samples without a score."""

    on_failed: Policy = "mask"
    """For samples whose function raised, timed out or returned an invalid score: ``raise`` stops the run, ``default``
    gives them `default_score`, ``mask`` marks them ``reward_masked``, so that they are excluded from training."""

    on_unscored: Policy = "mask"
    """The same choice for samples whose function returned ``None``."""

    default_score: float = Field(default=0.0, allow_inf_nan=False)
    """The score under the policy ``default``."""

    skip_special_tokens: bool = True
    """In a verl run: whether `solution_str` is decoded without special tokens, as in verl. ``False`` keeps them."""

    worker_start_timeout_s: float = Field(default=300.0, gt=0)
    """In a verl run: seconds within which every reward worker must load the tokenizer and the function."""

    worker_answer_timeout_s: float = Field(default=120.0, gt=0)
    """In a verl run: seconds within which a reward worker must answer the trainer, and a dead one must be reachable
    again; otherwise its samples fail. It must be longer than the restart of a worker; Ray takes up to 65 seconds to
    detect that a node is lost."""

    health: HealthConfig = Field(default_factory=HealthConfig)
    """In a verl run: the limits of the live numbers of each step, see docs/viewer.md."""

    batch: BatchConfig = Field(default_factory=BatchConfig)
    """For the manager ``batch``."""

    group: GroupConfig = Field(default_factory=GroupConfig)
    """For the manager ``group``."""
