"""Validate a result before it reaches the trainer: outcome and score match; score and dense rewards are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import InvalidScoreError, ScoringError, UnscoredError
from reward_loop.scoring.normalise import is_finite
from reward_loop.scoring.outcome import failed_after
from reward_loop.types import PART_KEYS, Outcome, RewardResult, RewardSample

__all__ = ["are_numbers", "check_result"]


def check_result(sample: RewardSample, result: RewardResult) -> RewardResult:
    """Return a manager's result for a sample, or a failed result if it is invalid.

    Checks:

    - The result has a score exactly if its outcome is *scored*.
    - The score is finite in float32. A sum of several finite scores can overflow.
    - Dense rewards are finite numbers, and token-level scores have one number per response token. The trainer checks
      the number of turn-level scores.

    An unscored or failed result without an exception gets one, for the policy ``raise``.
    """
    if result.score is None or result.outcome is not Outcome.SCORED:
        return _check_unscored(sample, result)
    if not is_finite(result.score):
        problem = f"its score is {result.score:g}, which is not finite in float32"
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    if PART_KEYS.isdisjoint(result.extra_info):
        return result
    for name in PART_KEYS & result.extra_info.keys():
        parts = result.extra_info[name]
        if not are_numbers(parts):
            problem = f"{name} must be a list of finite numbers; got {shorten(parts)}"
        elif name == "token_level_scores" and sample.response_length not in (None, len(parts)):
            problem = f"{len(parts)} {name}, and the response has {sample.response_length} tokens"
        else:
            continue
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    return result


def _check_unscored(sample: RewardSample, result: RewardResult) -> RewardResult:
    if (result.score is None) == (result.outcome is Outcome.SCORED):
        score = "no score" if result.score is None else f"the score {result.score!r}"
        problem = f"the reward manager returned the outcome {str(result.outcome)!r} with {score}"
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    if result.exception is not None:
        return result
    kind = UnscoredError if result.outcome is Outcome.UNSCORED else ScoringError
    error = kind(result.error or f"the reward manager returned {result.outcome} without a cause", sample=sample)
    text = str(error) if result.outcome is Outcome.FAILED else None
    return replace(result, exception=error, error=result.error or text)


def are_numbers(parts: Any) -> bool:
    """Return whether dense rewards are a sequence of finite numbers."""
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        return False
    return all(isinstance(part, Real) and is_finite(part) for part in parts)
