"""From what a function returned to the result of a sample: normalised, checked, and completed by the policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any

from reward_loop._util.json import portable
from reward_loop._util.text import first_line, listing, shorten
from reward_loop._util.transient import out_of_credit, retry_after
from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    InvalidScoreError,
    RewardFunctionError,
    RewardLoopError,
    ScoringError,
    UnscoredError,
    describe,
)
from reward_loop.processes.outcome import CallOutcome, cause_of, describe_exception
from reward_loop.types import PART_KEYS, RESERVED_KEYS, Outcome, RewardResult, RewardSample, finite_number

_MAX = (2 - 2**-23) * 2.0**127
"""The largest finite float32. Trainers store rewards in float32, where a larger score would become infinite."""

_NO_SCORE = "gave no score"

_ACCEPTED = "a number, a bool, a dict with `score`, a tuple (score, prompt, explanation), or None (unscored)"


def to_result(call: CallOutcome, sample: RewardSample, function: str) -> RewardResult:
    """Return the result of a sample from the outcome of its call.

    Args:
        call: the outcome, summed over all attempts.
        sample: the sample, for messages.
        function: the function's name and file, for messages.

    Raises:
        ConfigError: the function asked a judge with wrong options or without its API key, which stops the run.
    """
    score: float | None = None
    extra_info: dict[str, Any] = {}
    problem: ScoringError | None = None
    if call.error is not None:
        problem = call.error.about(sample, function, call.attempts)
    elif call.exception is not None:
        problem = _raised(call.exception, call, sample, function)
    else:
        try:
            score, extra_info = normalise(call.value)
            problem = None if score is not None else _unscored(extra_info, sample, function)
        except InvalidScoreError as error:
            problem = error.about(sample, function)
    outcome = Outcome.SCORED
    if problem is not None:
        is_unscored = isinstance(problem, UnscoredError | BudgetSpentError)
        outcome = Outcome.UNSCORED if is_unscored else Outcome.FAILED
    return RewardResult(
        outcome,
        score,
        extra_info,
        error=None if problem is None or getattr(problem, "problem", None) == _NO_SCORE else str(problem),
        attempts=call.attempts,
        work_s=call.work_s,
        wait_s=call.wait_s,
        queue_s=call.queue_s,
        outage_s=call.outage_s,
        exception=problem,
    )


def _unscored(extra_info: Mapping[str, Any], sample: RewardSample, function: str) -> UnscoredError:
    """Return the error of a sample without a score, with the reason if a judge gives one.

    Samples are grouped by the part of the reason that names no text of the reply.
    """
    explanation = extra_info.get("explanation")
    reason = ""
    if isinstance(explanation, str) and explanation.startswith("unscored: "):
        reason = ": " + explanation.partition("\n")[0].removeprefix("unscored: ")
    cause = f"no score from {function}" + reason[:2] + reason[2:].partition(": ")[0]
    return UnscoredError(_NO_SCORE + reason, sample=sample, function=function, cause=cause)


def _raised(cause: BaseException, call: CallOutcome, sample: RewardSample, function: str) -> ScoringError:
    """Return the error of a sample whose function raised an exception."""
    if out_of_credit(cause):
        raise RewardLoopError(
            f"{describe(sample)}: {function} calls a service whose account has no credit left, so the run stops. Add "
            f"credit or raise the account's limit, and resume the run. The function raised {describe_exception(cause)}"
        ) from cause
    if isinstance(cause, ConfigError):  # every other sample would fail, too
        raise ConfigError(f"{describe(sample)}: {function} raised {describe_exception(cause)}") from cause
    problem = RewardFunctionError(
        f"raised {describe_exception(cause)}{call.note or _advice(cause, function)}",
        sample=sample,
        function=function,
        attempts=call.attempts,
        retry_after=retry_after(cause),
        cause=cause_of(cause),
    )
    problem.__cause__ = cause
    return problem


OUTSIDE_THE_MAIN_THREAD = (
    "reward functions run outside of the main thread, where signals, such as the timeout of Math-Verify, and what "
    "belongs to the main thread, such as a connection of sqlite3, do not work. Make it a plain `def`, and run it in "
    "worker processes: decorate it with @reward_loop.isolated, or set isolation=process (in a verl run "
    "`reward_loop.isolation=process`, with the command `reward-loop` `-O isolation=process`)"
)

_OF_THE_MAIN_THREAD = ("signal only works in main thread", "SQLite objects created in a thread can only be used in")


def _advice(error: BaseException | None, function: str) -> str:
    """Return what to do about an exception that the reward loop can avoid; empty for others."""
    while error is not None:
        # Not `str`, which is code of the user or of a library, and may raise.
        message = next(iter(error.args), "")
        if isinstance(message, str) and message.startswith(_OF_THE_MAIN_THREAD):
            return f"\n{function}: {OUTSIDE_THE_MAIN_THREAD}"
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


def not_called(sample: RewardSample, problem: str) -> RewardResult:
    """Return the failed result of a sample with an invalid row, for which the function is not called."""
    return failed(ScoringError(problem, sample=sample, cause="invalid row"), attempts=0)


def normalise(returned: Any) -> tuple[float | None, dict[str, Any]]:
    """Return ``(score, extra_info)`` of a reward function's return value; a score of ``None`` means *unscored*.

    The extra info depends on the type, as in verl:

    - A number or bool: ``{"acc": number}``.
    - A dict: all its keys, including ``score``. Its values are made portable, see `portable`.
    - A tuple ``(score, prompt, explanation)``: the keys ``prompt`` and ``explanation``.
    - ``None``: empty.

    Raises:
        InvalidScoreError: the value has another type, a reserved key, or a score that is not a finite number.
    """
    if returned is None:
        return None, {}
    if type(returned) is float and -_MAX <= returned <= _MAX:  # fast path: skips the slow isinstance checks below
        return returned, {"acc": returned}
    try:
        if isinstance(returned, Mapping):
            return _from_mapping(returned)
        if isinstance(returned, tuple):
            return _from_tuple(returned)
        value = _scalar(returned)
        return _score(value, returned), {"acc": value}
    except InvalidScoreError:
        raise
    except Exception as error:  # for instance a tensor on a failed device
        raise InvalidScoreError(
            f"returned a {type(returned).__name__} that cannot be read: {shorten(error)}"
        ) from error


def is_finite(number: Any) -> bool:
    """Whether a number is finite in float32."""
    return bool(-_MAX <= number <= _MAX)


def _from_tuple(returned: tuple[Any, ...]) -> tuple[float | None, dict[str, Any]]:
    if len(returned) != 3:
        raise InvalidScoreError(
            f"returned a tuple of {len(returned)}, {shorten(returned)}, not (score, prompt, explanation)"
        )
    score, prompt, explanation = returned
    return _score(_scalar(score), returned), {"prompt": portable(prompt), "explanation": portable(explanation)}


def _from_mapping(returned: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
    if "score" not in returned:
        raise InvalidScoreError(
            f"returned a dict without `score`: {shorten(returned)}; its keys are {listing(map(str, returned))}"
        )
    if clash := RESERVED_KEYS & returned.keys():
        raise InvalidScoreError(f"returned {listing(clash)}, which the reward loop itself fills in: rename it")
    value = _scalar(returned["score"])
    return _score(value, returned), {**portable(returned), "score": value}


def _scalar(value: Any) -> Any:
    """Convert a 0-d array, tensor or numpy scalar to a Python number; return other values unchanged."""
    if (
        type(value) not in (float, int, bool)
        and getattr(value, "shape", None) == ()
        and callable(getattr(value, "tolist", None))
    ):
        return value.tolist()  # Not `item`, which is 0.0 for numpy's `masked`.
    return value


def _score(value: Any, returned: Any) -> float | None:
    if value is None:
        return None
    # `Decimal` is not registered as a `Real`.
    if not isinstance(value, Real | Decimal):
        shape = getattr(value, "shape", None)
        hint = f" of shape {tuple(shape)}; reduce it to one number" if shape else f"; return {_ACCEPTED}"
        raise InvalidScoreError(f"returned {shorten(returned)}, whose score is a {type(value).__name__}{hint}")
    try:
        score = float(value)
    except (OverflowError, ValueError):  # 10**400; Decimal("sNaN")
        score = math.inf
    if not is_finite(score):
        where = " in float32" if math.isfinite(score) else ""
        raise InvalidScoreError(
            f"returned {shorten(returned)}, whose score is not finite{where}; return None for a sample that cannot be "
            "scored"
        )
    return score


def check_result(sample: RewardSample, result: RewardResult) -> RewardResult:
    """Return a manager's result for a sample, or a failed result if it is invalid.

    Checks:

    - The result has a score exactly if its outcome is *scored*.
    - The score is a number that is finite in float32, and becomes a float. A sum of finite scores can overflow.
    - Dense rewards are finite numbers, one for each response token or turn of the policy. Arrays become lists.

    An unscored or failed result without an exception gets one, for the policy ``raise``.
    """
    if (result.score is None) == (result.outcome is Outcome.SCORED):
        score = "no score" if result.score is None else f"the score {result.score!r}"
        problem = f"the reward manager returned the outcome {str(result.outcome)!r} with {score}"
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    if result.score is None:
        return _with_exception(sample, result)
    number = result.score if type(result.score) is float else finite_number(result.score)
    if number is None or not -_MAX <= number <= _MAX:
        problem = f"its score is {shorten(result.score)}, which is not finite in float32"
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    if number is not result.score:  # of a manager of the user: trainers may not take a bool
        result = replace(result, score=number)
    if PART_KEYS.isdisjoint(result.extra_info):
        return result
    for name in PART_KEYS & result.extra_info.keys():
        parts = result.extra_info[name]
        if hasattr(parts, "tolist"):  # an array or a tensor: what is logged and sent is a list
            parts = parts.tolist()
            result = replace(result, extra_info={**result.extra_info, name: parts})
        if not are_numbers(parts):
            problem = f"{name} must be a list of finite numbers; got {shorten(parts)}"
        else:
            of_turns = name == "turn_level_scores"
            known, what = (sample.turn_count, "turns") if of_turns else (sample.response_length, "tokens")
            if known in (None, len(parts)):
                continue
            problem = f"{len(parts)} {name}, and the response has {known} {what}"
        return failed_after(result, InvalidScoreError(problem, sample=sample))
    return result


def _with_exception(sample: RewardSample, result: RewardResult) -> RewardResult:
    """Return a result without a score with an exception, which a manager of the user's own may not have set."""
    if result.exception is not None:
        return result
    kind = UnscoredError if result.outcome is Outcome.UNSCORED else ScoringError
    problem = result.error or f"the reward manager returned {result.outcome} without a cause"
    error = kind(problem, sample=sample, cause=first_line(problem))
    text = str(error) if result.outcome is Outcome.FAILED else None
    return replace(result, exception=error, error=result.error or text)


def are_numbers(parts: Any) -> bool:
    """Return whether dense rewards are a sequence of finite numbers."""
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        return False
    return all(isinstance(part, Real) and is_finite(part) for part in parts)
