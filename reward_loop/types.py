"""The contract of reward functions: the sample that they receive, and the result of scoring it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, Self, TypedDict

from reward_loop._util.text import first_line
from reward_loop.errors import ScoringError, UnscoredError

Policy = Literal["raise", "default", "mask"]
"""What happens to a sample without a score: ``raise`` an error, use the ``default`` score, or ``mask`` the sample
(exclude it from training)."""

MEASURED = ("attempts", "work_s", "wait_s", "queue_s", "outage_s", "total_s")
"""The fields of a `RewardResult` that the reward loop measures. Their keys in ``reward_extra_info`` are
``reward_<name>``."""

RESERVED_KEYS = frozenset(f"reward_{name}" for name in ("outcome", "masked", "error", "cause", *MEASURED))
"""Keys of ``reward_extra_info`` that the reward loop sets; a function must not return them."""

PART_KEYS = frozenset({"token_level_scores", "turn_level_scores"})
"""Keys of ``reward_extra_info`` with which a function assigns parts of its reward to positions in the response: one
number for each token, or one for each turn of the policy. The rest of the reward is assigned to the last token."""


def finite_number(value: Any) -> float | None:
    """Return a number, such as one of numpy or torch, as a float; ``None`` if the value is not a finite number."""
    # `float` also reads text, and an array with one element.
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # not a number; Decimal("sNaN"); 10**400
        return None
    return number if math.isfinite(number) else None


_TEXTS = (str, bytes, Mapping)


def missing(value: Any) -> bool:
    """Return whether a field of a row has no value: ``None``, NaN, NA or NaT of pandas, or only these in a list.

    JSON and parquet have different forms of it, which as a text would be an answer: "nan", "None".
    """
    if value is None:
        return True
    if isinstance(value, _TEXTS):
        return False
    if isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0:
        try:
            return len(value) > 0 and all(map(missing, value))
        except RecursionError:  # it contains itself
            return False
    try:
        return bool(value != value)
    except Exception:  # pandas.NA, and objects that compare otherwise
        return type(value).__name__ == "NAType"


def progress_of(step: int | None, total: int | None) -> float | None:
    """Return the share of ``total`` training steps that is done after ``step``; ``None`` if one is not known."""
    return min(1.0, step / total) if step is not None and total else None


class Outcome(StrEnum):
    """The outcome of scoring one sample."""

    SCORED = "scored"
    """The function returned a finite score."""
    UNSCORED = "unscored"
    """The function returned ``None``: it cannot judge the sample, or could not parse the judge's reply."""
    FAILED = "failed"
    """The function raised an error, timed out, or returned a value that is not a valid score."""


@dataclass(slots=True)  # not frozen: see `RewardResult`
class RewardSample:
    """One finished rollout, as a reward function receives it. The field names are those of verl.

    To change one, make another by `dataclasses.replace`.
    """

    solution_str: str
    """The decoded response, without special tokens."""
    data_source: str = ""
    """The data set of the prompt; a function may score by it."""
    ground_truth: Any = None
    """The reference answer; ``None`` if the data has none."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the data set. Each call of a function receives a copy of all fields; the caller's are never
    changed."""
    uid: str | None = None
    """The sample's name in messages and logs."""
    error: str | None = None
    """Why the sample cannot be scored, if its data is invalid. Such a sample fails without a call of the function."""
    validate: bool | None = False
    """Whether the sample belongs to validation; ``None`` if unknown."""
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
    turn_count: int | None = None
    """The number of the policy's turns in the response, which ``turn_level_scores`` must have; ``None`` if unknown."""
    response: str | None = None
    """For the sample's record: what the policy wrote, if a manager's ``to_sample`` has changed ``solution_str``; by
    default ``solution_str``. Set by the reward loop. Functions do not receive it."""
    response_ids: Sequence[int] | None = None
    """The token ids of the response; ``None`` if unknown."""
    is_truncated: bool | None = None
    """Whether the response was cut off at the largest length; ``None`` if unknown."""
    training_progress: float | None = None
    """The share of the run that is done, from 0 to 1; ``None`` if unknown."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer passes in addition, for functions with ``**kwargs``, such as ``trainer_state`` of TRL. It is not
    recorded, and objects in it are not copied."""

    @property
    def global_steps(self) -> int | None:
        """The training step: that which trains on the sample, or if it is not known yet, that which generated it."""
        return self.generated_step if self.step is None else self.step

    @property
    def traffic_class(self) -> str:
        """Whether the sample is batched with those of training (``train``) or of validation (``validate``)."""
        return "validate" if self.validate else "train"


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


@dataclass(slots=True)  # not frozen: a frozen one takes three times as long to create, for each sample
class RewardResult:
    """The result of scoring one sample. To change one, make another by `dataclasses.replace`: samples share results.

    All times are in seconds.
    """

    outcome: Outcome
    score: float | None
    """The score: a finite number if the outcome is *scored*, else ``None``."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The other keys that the function returned, for logging."""
    error: str | None = None
    """For a failed sample: the error message, with the names of the sample and the function."""
    attempts: int = 1
    """Number of calls of the function; 0 if no call was needed."""
    work_s: float = 0.0
    """Run time of the function, summed over all attempts, without waiting time."""
    wait_s: float = 0.0
    """Time spent waiting for limits and between attempts."""
    queue_s: float = 0.0
    """Time for which a sync function waited for a free thread or process, summed over all attempts."""
    outage_s: float = 0.0
    """Time spent waiting for a judge that could not be reached; part of `wait_s`."""
    total_s: float = 0.0
    """Time from the start of scoring the sample to its result; set by the manager."""
    # Not compared: an exception equals only itself, so equal results of two calls would differ.
    exception: ScoringError | None = field(default=None, repr=False, compare=False)
    """For an unscored or failed sample: the error that the policy ``raise`` raises."""
    policy: Policy | Literal["stop"] | None = None
    """For an unscored or failed sample: the policy, if it differs from that in the run's options."""
    reward: float | None = None
    """The number to train on: the score, or what the policy makes of a sample without one; set by the manager. ``None``
    if the sample is masked, or stops the run."""
    masked: bool = False
    """Whether the sample is excluded from training."""

    @property
    def cause(self) -> str | None:
        """The key by which samples without a score are grouped, see `ScoringError`; ``None`` if unknown or scored."""
        return None if self.exception is None else self.exception.cause

    @property
    def reason(self) -> str | None:
        """Why the sample has no score, for a reader; ``None`` if it is scored."""
        return self.error or ("the function gave no score" if self.outcome is Outcome.UNSCORED else None)

    @property
    def components(self) -> dict[str, float]:
        """The finite numbers that the function returned in addition to the score, by their keys."""
        numbers = {key: finite_number(value) for key, value in self.extra_info.items() if isinstance(key, str)}
        others = RESERVED_KEYS | {"score"}
        return {key: number for key, number in numbers.items() if number is not None and key not in others}

    def to_reward(self) -> Reward:
        """Return the return value of ``run_single``. A masked sample has the score 0.

        ``reward_extra_info`` contains the extra info that the function returned, and always the `RESERVED_KEYS`.

        Raises:
            ScoringError: the sample has no score, and stops the run.
        """
        if self.reward is None and not self.masked:
            raise self.exception or ScoringError(self.error or f"a sample is {self.outcome} without a cause")
        returned = self.extra_info
        if self.score is None:  # dense rewards without a score are not valid
            returned = {name: value for name, value in returned.items() if name not in PART_KEYS}
        return {
            "reward_score": self.reward or 0.0,
            "reward_extra_info": ExtraInfo(
                returned,
                reward_outcome=str(self.outcome),
                reward_masked=self.masked,
                reward_error=self.error or "",
                reward_cause=self.cause or "",
                reward_attempts=self.attempts,
                reward_work_s=self.work_s,
                reward_wait_s=self.wait_s,
                reward_queue_s=self.queue_s,
                reward_outage_s=self.outage_s,
                reward_total_s=self.total_s,
            ),
        }

    @classmethod
    def of(cls, reward: Reward, uid: str | None = None) -> Self:
        """Return the result from which a reward was made, or which a manager that was written for verl means.

        If the manager reports no outcome, the sample is *scored*; if its score is not a finite number, *failed*.

        Args:
            reward: the return value of ``run_single``.
            uid: the name of the sample, for messages.
        """
        info = reward.get("reward_extra_info") or {}
        outcome = Outcome(info.get("reward_outcome") or Outcome.SCORED)
        error, cause = info.get("reward_error") or None, info.get("reward_cause") or None
        masked = bool(info.get("reward_masked"))
        number = None if masked else finite_number(reward["reward_score"])
        if number is None and not masked:
            wrong = reward["reward_score"]
            error = f"sample {uid}: the manager returned the score {wrong!r}, which is not a finite number"
            # Masked: NaN must not reach a tensor, and no policy has given this sample another number.
            outcome, cause, masked = Outcome.FAILED, None, True
        exception = None
        if outcome is not Outcome.SCORED:
            kind = UnscoredError if outcome is Outcome.UNSCORED else ScoringError
            exception = kind(error or "", cause=cause or (first_line(error) if error else f"{outcome} without a cause"))
        return cls(
            outcome,
            number if outcome is Outcome.SCORED else None,
            {name: value for name, value in info.items() if name not in RESERVED_KEYS},
            error,
            exception=exception,
            reward=number,
            masked=masked,
            **{name: info[key] for name in MEASURED if (key := f"reward_{name}") in info},
        )


class ComputeScore(Protocol):
    """A reward function, sync or async.

    The function receives only the arguments it declares, as keyword arguments. Available are ``data_source``,
    ``solution_str``, ``ground_truth``, ``extra_info``, ``reward_router_address`` (``host:port``),
    ``reward_model_tokenizer`` and the configured ``reward_kwargs``, which ``**kwargs`` also gets; and ``prompt``,
    ``response_ids``, ``response_length``, ``is_truncated``, ``global_steps``, ``training_progress``, ``validate`` and
    ``uid``, where they are known; and ``attempt``, the number of the call for the sample, 1 for the first. Each call
    has its own copies: what it changes, no other call sees.

    The function returns a number, a bool, a dict with ``score``, a tuple ``(score, prompt, explanation)``, or ``None``
    (*unscored*).

    Example::

        def compute_score(solution_str, ground_truth):
            return float(solution_str.strip() == ground_truth)
    """

    def __call__(self, **kwargs: Any) -> Any | Awaitable[Any]: ...
