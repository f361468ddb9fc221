"""The policies for unscored and failed samples, and the record of a sample with what they made of it."""

from __future__ import annotations

import zlib
from typing import Any, Literal

from reward_loop.errors import BudgetSpentError, ScoringError, UnscoredError
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import (
    ActiveSample,
    Records,
    exchanges_of,
    large_components,
    records,
    reward_change_row,
    sample_row,
    text_row,
)
from reward_loop.types import (
    PART_KEYS,
    RESERVED_KEYS,
    ExtraInfo,
    Outcome,
    Policy,
    Reward,
    RewardResult,
    RewardSample,
    finite_number,
)

__all__ = [
    "apply_policy",
    "open_records",
    "policy_of",
    "record_reward_change",
    "record_sample",
    "result_of",
    "reward_after_policy",
]


def apply_policy(result: RewardResult, options: RewardLoopConfig) -> Reward:
    """Convert a result to a reward, the return value of ``run_single``.

    ``reward_extra_info`` contains the extra info that the function returned, and always ``reward_outcome``,
    ``reward_masked``, ``reward_seconds``, ``reward_wait_seconds``, ``reward_queue_seconds``, ``reward_outage_seconds``,
    ``reward_attempts``, ``reward_error`` and ``reward_cause``. A masked sample has the score 0.

    Raises:
        ScoringError: the sample has no score, and the policy is ``raise``.
    """
    score, masked = reward_after_policy(result, options)
    if score is None and not masked:
        raise result.exception or _error_of(result)
    extra_info = result.extra_info
    if result.score is None:  # dense rewards without a score are not valid
        extra_info = {name: value for name, value in extra_info.items() if name not in PART_KEYS}
    return {
        "reward_score": 0.0 if score is None else score,
        "reward_extra_info": ExtraInfo(
            extra_info,
            reward_outcome=str(result.outcome),
            reward_masked=masked,
            reward_seconds=result.seconds,
            reward_wait_seconds=result.wait_seconds,
            reward_queue_seconds=result.queue_seconds,
            reward_attempts=result.attempts,
            reward_error=result.error or "",
            reward_cause=result.cause or "",
            reward_outage_seconds=result.outage_seconds,
        ),
    }


def result_of(reward: Reward) -> RewardResult:
    """Convert a reward back to its result. Without an outcome, the sample is *scored*."""
    info = reward.get("reward_extra_info") or {}
    outcome = Outcome(info.get("reward_outcome") or Outcome.SCORED)
    error = info.get("reward_error") or None
    exception = None
    if outcome is not Outcome.SCORED:
        kind = UnscoredError if outcome is Outcome.UNSCORED else ScoringError
        exception = kind(
            error or f"a sample is {outcome}; its reward manager gave no cause", cause=info.get("reward_cause")
        )
    return RewardResult(
        outcome,
        finite_number(reward["reward_score"]) if outcome is Outcome.SCORED else None,
        {name: value for name, value in info.items() if name not in RESERVED_KEYS},
        error=error,
        exception=exception,
        seconds=info.get("reward_seconds", 0.0),
        attempts=info.get("reward_attempts", 1),
        wait_seconds=info.get("reward_wait_seconds", 0.0),
        queue_seconds=info.get("reward_queue_seconds", 0.0),
        outage_seconds=info.get("reward_outage_seconds", 0.0),
    )


def policy_of(result: RewardResult, options: RewardLoopConfig) -> Policy | Literal["stop"]:
    """Return what happens to a result without a score: ``raise``, ``stop``, ``default`` or ``mask``."""
    if isinstance(result.exception, BudgetSpentError):
        return options.budget.at_cap
    return result.policy or (options.on_failed if result.outcome is Outcome.FAILED else options.on_unscored)


def reward_after_policy(result: RewardResult, options: RewardLoopConfig) -> tuple[float | None, bool]:
    """Return the reward, ``None`` if the sample is masked or stops the run, and whether the sample is masked."""
    if result.score is not None:
        return result.score, False
    policy = policy_of(result, options)
    return (options.default_score if policy == "default" else None), policy == "mask"


def _error_of(result: RewardResult) -> ScoringError:
    """Return an error for a result that the manager created without an exception."""
    if result.outcome is Outcome.UNSCORED:
        return UnscoredError(result.error or "a sample is unscored; its reward manager gave no cause")
    return ScoringError(result.error or "a sample failed; its reward manager gave no cause")


def open_records(options: RewardLoopConfig) -> Records | None:
    """Return this process's writer for ``log_dir``; ``None`` if the folder does not exist."""
    return records(options.log_dir, options.record.max_bytes) if options.log_dir else None


def record_sample(writer: Records, active: ActiveSample, result: RewardResult, options: RewardLoopConfig) -> None:
    """Record a sample that has been scored, with its reward after the policy."""
    full = options.record.full
    is_full = full >= 1 or result.outcome is not Outcome.SCORED or _fraction(active.sample) < full
    large = large_components(result.extra_info)
    text = text_row(active.sample, large) if is_full else None
    row = sample_row(active, result, large, *reward_after_policy(result, options))
    writer.write(row, text, exchanges_of(active) if active.exchanges else ())


def record_reward_change(options: RewardLoopConfig, sample: RewardSample, function: str, **changes: Any) -> None:
    """Record that the reward of a recorded sample has changed; see `reward_change_row` for the arguments."""
    if (writer := open_records(options)) is not None:
        writer.write(reward_change_row(sample, function, **changes))


def _fraction(sample: RewardSample) -> float:
    """Return a number from 0 to 1, the same for all samples of a group, and in all processes and runs."""
    name = sample.group or sample.uid or sample.solution_str
    return zlib.crc32(name.encode("utf-8", "backslashreplace")) / 2**32
