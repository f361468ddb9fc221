"""Convert the outcome of a call to the result of a sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reward_loop._util.transient import retry_after
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    InvalidScoreError,
    JobServiceError,
    RewardFunctionError,
    ScoringError,
    UnscoredError,
    describe,
)
from reward_loop.processes.outcome import CallOutcome, describe_exception
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
        ConfigError: the function asked a judge with wrong options or without its API key, which stops the run.
    """
    score: float | None = None
    extra_info: dict[str, Any] = {}
    problem = _problem(call, sample, function)
    if problem is None:
        try:
            score, extra_info = normalise(call.value)
        except InvalidScoreError as error:
            problem = error.about(sample, function)
        else:
            if score is None:
                problem = UnscoredError("gave no score", sample=sample, function=function)
    outcome = Outcome.SCORED
    if problem is not None:
        is_unscored = isinstance(problem, UnscoredError | BudgetSpentError)
        outcome = Outcome.UNSCORED if is_unscored else Outcome.FAILED
    return RewardResult(
        outcome,
        score,
        extra_info,
        error=None if problem is None or isinstance(problem, UnscoredError) else str(problem),
        seconds=call.seconds,
        attempts=call.attempts,
        wait_seconds=call.waited,
        queue_seconds=call.queued,
        exception=problem,
    )


def _problem(call: CallOutcome, sample: RewardSample, function: str) -> ScoringError | None:
    """Return why a call has no value, or ``None`` if it has one."""
    if call.error is not None:
        return call.error.about(sample, function, call.attempts)
    cause = call.exception
    if cause is None:
        return None
    if isinstance(cause, JobServiceError):
        raise cause
    if isinstance(cause, ConfigError):  # every other sample would fail, too
        raise ConfigError(f"{describe(sample)}: {function} raised {describe_exception(cause)}") from cause
    problem = RewardFunctionError(
        f"raised {describe_exception(cause)}{_advice(cause)}",
        sample=sample,
        function=function,
        attempts=call.attempts,
        retry_after=retry_after(cause),
    )
    problem.__cause__ = cause
    return problem


def _advice(error: BaseException | None) -> str:
    """Return what to do about an exception that the reward loop can avoid; empty for others."""
    while error is not None:
        if isinstance(error, ValueError) and "signal only works in main thread" in str(error):
            return (
                "\nThe function uses signals, for example as a timeout, and runs in a thread. Run it in worker "
                "processes: isolation=process (in a verl run `reward_loop.isolation=process`, with the command "
                "`reward-loop` `--isolation process`)"
            )
        error = error.__cause__ or error.__context__
    return ""


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
