"""The whole contract on one page: what goes into a reward function, and what comes out."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict

from reward_loop.errors import ScoringError

__all__ = ["PART_KEYS", "RESERVED_KEYS", "ComputeScore", "Outcome", "Policy", "Reward", "RewardResult", "RewardSample"]

Policy = Literal["raise", "default", "mask"]
"""What happens to a sample without a score: raise, give it the default score, or leave it out of training."""

RESERVED_KEYS = frozenset(
    {
        "reward_outcome",
        "reward_masked",
        "reward_seconds",
        "reward_error",
        "reward_attempts",
        "reward_wait_seconds",
        "reward_queue_seconds",
    }
)
"""Keys of ``reward_extra_info`` that the reward loop itself fills in; a function must not return them."""

PART_KEYS = frozenset({"token_level_scores", "turn_level_scores"})
"""Keys of ``reward_extra_info`` by which a function says where in the response parts of its reward go: a number for
each token, or for each turn of the policy. What they leave of the reward goes to the last token."""


class Outcome(StrEnum):
    """How the scoring of one sample ended. The three are never confused."""

    SCORED = "scored"
    """The function returned a finite score."""
    UNSCORED = "unscored"
    """The function returned ``None``: it has no opinion, or the judge's answer could not be parsed."""
    FAILED = "failed"
    """The function raised, timed out, or returned something that is no score."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One finished rollout, as a reward function sees it. Names are verl's."""

    solution_str: str
    """The decoded response, special tokens left out."""
    data_source: str = ""
    """Which data set the prompt came from; functions choose their rule by it."""
    ground_truth: Any = None
    """The reference answer, or ``None`` where the data has none."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the data set carries. A function receives a copy; the caller's mapping is never changed."""
    uid: str | None = None
    """The sample's name in messages and logs."""
    error: str | None = None
    """Why it cannot be scored, where the row it was made from is broken. Such a sample fails without a call."""
    validate: bool = False
    """Whether it belongs to validation. Training and validation get their turns at a limit alternately."""
    response_length: int | None = None
    """Tokens of the response, where they were counted."""
    group: str | None = None
    """Names the prompt that it answers: what managers that compare samples compare it within."""
    group_size: int | None = None
    """How many samples its group has."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What became of one sample."""

    outcome: Outcome
    score: float | None
    """A finite number if and only if the outcome is *scored*."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The other keys that the function returned, for logs."""
    error: str | None = None
    """For a failed sample: what went wrong, naming sample and function."""
    seconds: float = 0.0
    """How long the function itself ran, in seconds, over all attempts; waiting is not counted."""
    attempts: int = 1
    """How often the function was called; 0 for a score from the cache, and for a sample that needed no call."""
    wait_seconds: float = 0.0
    """How long it waited for limits, and between attempts, in seconds."""
    exception: ScoringError | None = field(default=None, repr=False, compare=False)
    """For an unscored or failed sample: what to raise where the policy is to raise."""
    policy: Policy | None = None
    """For an unscored or failed sample: what becomes of it, where that is not what the run's options say."""
    queue_seconds: float = 0.0
    """How long a sync function waited for a thread or a process, in seconds, over all attempts."""


class Reward(TypedDict):
    """What ``run_single`` returns: verl's own contract."""

    reward_score: float
    reward_extra_info: dict[str, Any]


class ComputeScore(Protocol):
    """A reward function, sync or async.

    It is called by keyword with those of ``data_source``, ``solution_str``, ``ground_truth``, ``extra_info``,
    ``reward_router_address`` (``host:port``), ``reward_model_tokenizer`` and the configured ``reward_kwargs`` that its
    signature names; with all of them if it takes ``**kwargs``.

    It returns a number, a bool, a dict with ``score``, a tuple ``(score, prompt, explanation)``, or ``None``
    (*unscored*).
    """

    def __call__(self, **kwargs: Any) -> Any | Awaitable[Any]: ...
