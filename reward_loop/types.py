"""The contract of reward functions: the sample that they receive, and the result of scoring it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict

from reward_loop.errors import ScoringError

__all__ = [
    "PART_KEYS",
    "RESERVED_KEYS",
    "ComputeScore",
    "ExtraInfo",
    "Outcome",
    "Policy",
    "Reward",
    "RewardResult",
    "RewardSample",
    "finite_number",
    "is_returned",
    "returned_numbers",
]

Policy = Literal["raise", "default", "mask"]
"""What happens to a sample without a score: ``raise`` an error, use the ``default`` score, or ``mask`` the sample
(exclude it from training)."""

RESERVED_KEYS = frozenset(
    {
        "reward_outcome",
        "reward_masked",
        "reward_seconds",
        "reward_error",
        "reward_cause",
        "reward_attempts",
        "reward_wait_seconds",
        "reward_queue_seconds",
        "reward_outage_seconds",
    }
)
"""Keys of ``reward_extra_info`` that the reward loop sets; a function must not return them."""

PART_KEYS = frozenset({"token_level_scores", "turn_level_scores"})
"""Keys of ``reward_extra_info`` with which a function assigns parts of its reward to positions in the response: one
number for each token, or one for each turn of the policy. The rest of the reward is assigned to the last token."""

_MEASURED = ("/seconds", "/wait_seconds", "/queue_seconds", "/attempts")
"""The ends of the keys under which the manager `composite` reports its measurements."""


def is_returned(key: object) -> bool:
    """Return whether a key of ``reward_extra_info`` comes from the function, and not from the reward loop."""
    return key not in RESERVED_KEYS and not str(key).endswith(_MEASURED)


def returned_numbers(extra_info: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers that the function returned, ``score`` included, without texts and measurements.

    Only keys that are strings are returned.
    """
    numbers = {key: finite_number(value) for key, value in extra_info.items() if isinstance(key, str)}
    return {key: number for key, number in numbers.items() if number is not None and is_returned(key)}


def finite_number(value: Any) -> float | None:
    """Return a number, such as one of numpy or torch, as a float; ``None`` if the value is not a finite number."""
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # not a number; Decimal("sNaN"); 10**400
        return None
    return number if math.isfinite(number) else None


class Outcome(StrEnum):
    """The outcome of scoring one sample."""

    SCORED = "scored"
    """The function returned a finite score."""
    UNSCORED = "unscored"
    """The function returned ``None``: it cannot judge the sample, or could not parse the judge's reply."""
    FAILED = "failed"
    """The function raised an error, timed out, or returned a value that is not a valid score."""


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One finished rollout, as a reward function receives it. The field names are those of verl."""

    solution_str: str
    """The decoded response, without special tokens."""
    data_source: str = ""
    """The data set of the prompt; a function may score by it."""
    ground_truth: Any = None
    """The reference answer; ``None`` if the data has none."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the data set. A function receives a copy; the caller's mapping is never changed."""
    uid: str | None = None
    """The sample's name in messages and logs."""
    error: str | None = None
    """Why the sample cannot be scored, if its data is invalid. Such a sample fails without a call of the function."""
    validate: bool | None = False
    """Whether the sample belongs to validation; ``None`` if unknown. A limit serves waiting training and validation
    samples alternately."""
    response_length: int | None = None
    """Number of response tokens; ``None`` if unknown."""
    group: str | None = None
    """Id of the group: all samples for the same prompt. Managers that compare samples compare them within a group."""
    group_size: int | None = None
    """Number of samples in the group."""
    prompt: Any = None
    """The prompt, as text or as chat messages."""
    step: int | None = None
    """The training step that trains on the sample; ``None`` if unknown."""
    generated_step: int | None = None
    """The training step in which the prompt was submitted for generation; ``None`` if unknown."""
    turns: Sequence[int] | None = None
    """For the sample's record, if the response has several turns: the number of characters of each part of the
    response, by the policy and by the environment in turn, beginning with the policy."""
    response: str | None = None
    """For the sample's record: what the policy wrote, if a manager's ``to_sample`` has changed ``solution_str``; by
    default ``solution_str``. Set by the reward loop. Functions do not receive it."""
    response_ids: Sequence[int] | None = None
    """The token ids of the response; ``None`` if unknown."""
    is_truncated: bool | None = None
    """Whether the response was cut off at the largest length; ``None`` if unknown."""
    training_progress: float | None = None
    """The share of the run that is done, from 0 to 1; ``None`` if unknown."""
    is_probe: bool = False
    """Whether an audit asks about this answer, see docs/health.md. Its calls wait for limits behind all
    others, and are neither cached nor counted as samples."""

    @property
    def global_steps(self) -> int | None:
        """The training step: that which trains on the sample, or if it is not known yet, that which generated it."""
        return self.generated_step if self.step is None else self.step

    @property
    def traffic_class(self) -> str:
        """The traffic class of the sample's calls in limits: ``train``, ``validate`` or ``probe``."""
        return "probe" if self.is_probe else "validate" if self.validate else "train"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The result of scoring one sample."""

    outcome: Outcome
    score: float | None
    """The score: a finite number if the outcome is *scored*, else ``None``."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The other keys that the function returned, for logging."""
    error: str | None = None
    """For a failed sample: the error message, with the names of the sample and the function."""
    seconds: float = 0.0
    """Run time of the function in seconds, summed over all attempts, without waiting time."""
    attempts: int = 1
    """Number of calls of the function; 0 if the score came from the cache or no call was needed."""
    wait_seconds: float = 0.0
    """Time in seconds spent waiting for limits and between attempts."""
    exception: ScoringError | None = field(default=None, repr=False, compare=False)
    """For an unscored or failed sample: the error that the policy ``raise`` raises."""
    policy: Policy | None = None
    """For an unscored or failed sample: the policy, if it differs from that in the run's options."""
    queue_seconds: float = 0.0
    """Time in seconds that a sync function waited for a free thread or process, summed over all attempts."""
    outage_seconds: float = 0.0
    """Time in seconds spent waiting for a judge that could not be reached; part of `wait_seconds`."""

    @property
    def cause(self) -> str | None:
        """The key by which samples without a score are grouped, see `ScoringError`; ``None`` if unknown or scored."""
        return None if self.exception is None else self.exception.cause


class ExtraInfo(dict[str, Any]):
    """The extra info of a reward. Reading a key that it lacks gives ``None``.

    verl's ``compute_rm_score`` reads the keys of the first sample from the extra info of all samples. Keys differ
    between samples: a failed sample lacks those that the function returns.
    """

    def __missing__(self, key: str) -> None:
        return None


class Reward(TypedDict):
    """The return value of ``run_single``, the same as in verl."""

    reward_score: float
    reward_extra_info: dict[str, Any]


class ComputeScore(Protocol):
    """A reward function, sync or async.

    The function receives only the arguments it declares, as keyword arguments. Available are ``data_source``,
    ``solution_str``, ``ground_truth``, ``extra_info``, ``reward_router_address`` (``host:port``),
    ``reward_model_tokenizer`` and the configured ``reward_kwargs``, which ``**kwargs`` also gets; and ``prompt``,
    ``response_ids``, ``response_length``, ``is_truncated``, ``global_steps``, ``training_progress`` and ``validate``,
    where they are known.

    The function returns a number, a bool, a dict with ``score``, a tuple ``(score, prompt, explanation)``, or ``None``
    (*unscored*).

    Example::

        def compute_score(solution_str, ground_truth):
            return float(solution_str.strip() == ground_truth)
    """

    def __call__(self, **kwargs: Any) -> Any | Awaitable[Any]: ...
