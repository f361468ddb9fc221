"""Convert the outcome of a call to the result of a sample."""

from __future__ import annotations

from dataclasses import replace

from reward_loop._util.transient import retry_after
from reward_loop.errors import (
    BudgetSpentError,
    InvalidScoreError,
    JobServiceError,
    RewardFunctionError,
    ScoringError,
    UnscoredError,
)
from reward_loop.processes.invocation import CallOutcome, describe_exception
from reward_loop.scoring.normalise import normalise
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["failed", "failed_after", "not_called", "to_result"]


def to_result(call: CallOutcome, sample: RewardSample, function: str) -> RewardResult:
    """Return the result of a sample from the outcome of its call.

    Args:
        call: the outcome, summed over all attempts.
        sample: the sample, for messages.
        function: the function's name and file, for messages.

    Raises:
        JobServiceError: the call failed because the limiter service is unreachable, which stops the run.
    """
    if call.exception is not None or call.error is not None:
        return _without_value(call, sample, function)
    problem: ScoringError | None = None
    try:
        score, extra_info = normalise(call.value)
        outcome = Outcome.SCORED
        if score is None:
            outcome, problem = Outcome.UNSCORED, UnscoredError("gave no score", sample=sample, function=function)
    except InvalidScoreError as error:
        score, extra_info, outcome = None, {}, Outcome.FAILED
        problem = error.about(sample, function)
    return RewardResult(
        outcome,
        score,
        extra_info,
        str(problem) if outcome is Outcome.FAILED else None,
        call.seconds,
        call.attempts,
        call.waited,
        problem,
        None,
        call.queued,
    )


def _without_value(call: CallOutcome, sample: RewardSample, function: str) -> RewardResult:
    cause = call.exception
    if isinstance(cause, JobServiceError):
        raise cause
    if cause is None:
        assert call.error is not None
        problem = call.error.about(sample, function, call.attempts)
    else:
        problem = RewardFunctionError(
            f"raised {describe_exception(cause)}",
            sample=sample,
            function=function,
            attempts=call.attempts,
            retry_after=retry_after(cause),
        )
        problem.__cause__ = cause
    return RewardResult(
        Outcome.UNSCORED if isinstance(problem, BudgetSpentError) else Outcome.FAILED,
        None,
        error=str(problem),
        seconds=call.seconds,
        attempts=call.attempts,
        wait_seconds=call.waited,
        queue_seconds=call.queued,
        exception=problem,
    )


def failed(problem: ScoringError, attempts: int = 1) -> RewardResult:
    """Return the result of a sample that failed outside of a call of the function."""
    return RewardResult(Outcome.FAILED, None, error=str(problem), attempts=attempts, exception=problem)


def failed_after(called: RewardResult, problem: ScoringError) -> RewardResult:
    """Return a failed result that replaces ``called``: the call returned an invalid value. Timings are kept."""
    return replace(
        called, outcome=Outcome.FAILED, score=None, extra_info={}, error=str(problem), exception=problem, policy=None
    )


def not_called(sample: RewardSample) -> RewardResult:
    """Return the failed result of a sample with an invalid row, for which the function is not called."""
    return failed(ScoringError(sample.error or "its row is invalid", sample=sample), attempts=0)
