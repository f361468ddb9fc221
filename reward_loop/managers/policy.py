"""Apply the policies for unscored and failed samples."""

from __future__ import annotations

from typing import Literal

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import BudgetSpentError, ScoringError, UnscoredError
from reward_loop.limits.failures import FailureBound, SharedFailureBound
from reward_loop.managers.recording import record_reward_change
from reward_loop.types import PART_KEYS, RESERVED_KEYS, Outcome, Policy, Reward, RewardResult, RewardSample

__all__ = ["apply_policy", "fail_reward", "policy_of", "reward_after_policy"]


def apply_policy(result: RewardResult, options: RewardLoopConfig) -> Reward:
    """Convert a result to a reward, the return value of ``run_single``.

    ``reward_extra_info`` contains the extra info that the function returned, and always ``reward_outcome``,
    ``reward_masked``, ``reward_seconds``, ``reward_wait_seconds``, ``reward_queue_seconds``, ``reward_attempts`` and
    ``reward_error``. A masked sample has the score 0.

    Raises:
        ScoringError: the sample has no score, and the policy is ``raise``.
    """
    score, masked, extra_info = result.score, False, result.extra_info
    if score is None:
        policy = policy_of(result, options)
        if policy in ("raise", "stop"):
            raise result.exception or _error_of(result)
        masked = policy == "mask"
        score = 0.0 if masked else options.default_score
        # Dense rewards without a score are not valid.
        extra_info = {name: value for name, value in extra_info.items() if name not in PART_KEYS}
    return {
        "reward_score": score,
        "reward_extra_info": {
            **extra_info,
            "reward_outcome": str(result.outcome),
            "reward_masked": masked,
            "reward_seconds": result.seconds,
            "reward_wait_seconds": result.wait_seconds,
            "reward_queue_seconds": result.queue_seconds,
            "reward_attempts": result.attempts,
            "reward_error": result.error or "",
        },
    }


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


def fail_reward(
    reward: Reward, failure: ScoringError, failures: FailureBound | SharedFailureBound, options: RewardLoopConfig
) -> Reward:
    """Return the reward of a failed sample, for a sample that failed after its function had returned.

    The sample's record gets a revision, whose outcome is *failed*.

    Args:
        reward: the reward that ``run_single`` returned.
        failure: the error, which names the sample.
        failures: the failure bound, which counts the sample.
        options: the policies.

    Raises:
        ScoringError: the policy is ``raise``.
        TooManyFailuresError: the share of failed samples among the recent samples is too large.
    """
    info = reward.get("reward_extra_info") or {}
    result = RewardResult(
        Outcome.FAILED,
        None,
        extra_info={key: value for key, value in info.items() if key not in RESERVED_KEYS},
        error=str(failure),
        seconds=info.get("reward_seconds", 0.0),
        attempts=info.get("reward_attempts", 1),
        wait_seconds=info.get("reward_wait_seconds", 0.0),
        queue_seconds=info.get("reward_queue_seconds", 0.0),
        exception=failure,
    )
    sample = RewardSample("", uid=failure.sample_uid, data_source=failure.data_source)
    after, masked = reward_after_policy(result, options)
    changes = {"outcome": Outcome.FAILED, "error": result.error, "reward": after, "masked": masked}
    record_reward_change(options, sample, failure.function or "", **changes)
    failures.count(result)
    return apply_policy(result, options)
