"""The options of the managers, and `RewardLoopConfig`, which puts the options of all rooms together."""

from __future__ import annotations

from typing import Any, Literal

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
    """Seconds from the first sample of a group to the last, where nobody reports the samples that will not come: verl's
    own reward loop, single requests. After that, an incomplete group fails."""


class ComponentConfig(Config):
    """One of the rewards of the manager ``composite``."""

    path: str | None = None
    """The function, as in ``custom_reward_function``: a file, ``pkg://module``, or ``reward.py:accuracy``. By default
    the function of the run: ``custom_reward_function``, or verl's function for the data source."""

    name: str | None = None
    """The name of the function, if `path` does not contain it. By default ``compute_score``."""

    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function, or of its class."""

    data_sources: str | tuple[str, ...] | None = None
    """The data sources whose samples it scores: names, or patterns such as ``math*``. ``others`` are those that no
    other component names. By default it scores all samples."""

    phase: Literal["train", "validate"] | None = None
    """``train``: it scores only the samples of training; ``validate``: only those of validations. By default both."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The factor of its score in the sum of the scores."""

    gate: float | None = Field(default=None, allow_inf_nan=False)
    """A threshold: the components after this one are called, and count, only if its score is at least this number."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds from the start of the function to its deadline. By default the value of the run's options, as for the
    policies below."""

    limit: str = "default"
    """The name of the entry of ``reward_loop.limits`` for its calls."""

    on_failed: Policy | None = None
    """For samples for which this function fails: ``raise`` stops the run, ``default`` uses `default_score` as its
    score, ``mask`` excludes the sample from training."""

    on_unscored: Policy | None = None
    """The same choice for samples for which this function returns ``None``."""

    default_score: float | None = Field(default=None, allow_inf_nan=False)
    """Its score under the policy ``default``."""


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
    """In a verl run: the limits of the live numbers of each step, see docs/health.md."""

    batch: BatchConfig = Field(default_factory=BatchConfig)
    """For the manager ``batch``."""

    group: GroupConfig = Field(default_factory=GroupConfig)
    """For the manager ``group``."""

    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """For the manager ``composite``: its rewards by name, in the order in which gates apply."""
