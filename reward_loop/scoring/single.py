"""Reward functions of one sample. Every sample gets exactly one result, also when the function fails."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from reward_loop.errors import InvalidScoreError, RewardFunctionError
from reward_loop.limits.call import Call
from reward_loop.processes.outcome import CallOutcome, describe_exception
from reward_loop.scoring.cache import Cache
from reward_loop.scoring.call import UserFunction
from reward_loop.scoring.normalise import normalise
from reward_loop.scoring.outcome import not_called, to_result
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["ScoringFunction"]


class ScoringFunction(UserFunction):
    """Calls the user's reward function for single samples, with a deadline, retries, limits and a cache.

    ``await function(sample)`` returns a `RewardResult`. An exception in the user's code, a passed deadline and an
    invalid return value become *failed* results. Cancellation, Ctrl-C and the errors listed at `__call__` propagate.

    Async functions are awaited on the event loop. Sync functions run in daemon threads, or in worker processes; if a
    sync function returns an awaitable, it is awaited on the event loop.

    Example::

        function = ScoringFunction(compute_score, timeout=60)
        result = await function(RewardSample("2+2=4", ground_truth="4"))
    """

    @property
    def has_post_process(self) -> bool:
        """Whether the user's class has ``post_process_scores``."""
        return self._target.post_process_scores is not None

    async def __call__(
        self,
        sample: RewardSample,
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> RewardResult:
        """Score one sample.

        Raises:
            JobServiceError: the limiter service is unreachable.
            ConfigError: the cache file cannot be read.
        """
        if sample.error is not None:
            return not_called(sample)
        try:
            arguments = self._target.arguments(sample, reward_router_address, reward_model_tokenizer)
        except RecursionError:
            return not_called(replace(sample, error="its extra_info is nested too deeply, or contains itself"))
        if self._cache is not None and (key := self._cache.key(arguments)) is not None:
            return await self._cached(self._cache, key, sample, arguments)
        return to_result(await self._call(arguments, validate=sample.validate), sample, self.name)

    async def _cached(self, cache: Cache, key: bytes, sample: RewardSample, arguments: dict[str, Any]) -> RewardResult:
        """Use a stored score, or the outcome of an equal call in flight; otherwise call, and store the score."""
        known = await cache.get(key)
        if known is not None:
            return RewardResult(Outcome.SCORED, *known, attempts=0)

        async def call() -> CallOutcome:
            outcome = await self._call(arguments, validate=sample.validate)
            result = to_result(outcome, sample, self.name)
            if result.score is not None:
                await cache.put(key, result.score, result.extra_info)
            return outcome

        return to_result(await cache.once(key, call), sample, self.name)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Return the scores after the class's ``post_process_scores``, or unchanged if the class has none.

        Raises:
            ScoringError: the method raised, ran past the deadline, or did not return one finite number per score.
        """
        if self._target.post_process_scores is None:
            return scores
        method = f"post_process_scores beside {self.name}"
        call, deadlines = Call(self.limits, self.timeout), self._deadlines_here()
        process = functools.partial(_process, self._target.post_process_scores, scores)
        try:
            outcome = await self._call_in_thread(call, process, {}, deadlines)
        except (OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            deadlines.forget(call)
        if outcome.error is not None:
            raise outcome.error.about(function=method)
        if outcome.exception is not None:
            problem = f"raised {describe_exception(outcome.exception)}"
            raise RewardFunctionError(problem, function=method) from outcome.exception
        try:
            processed = [normalise(score)[0] for score in outcome.value]
        except (InvalidScoreError, TypeError) as error:
            raise InvalidScoreError(f"must return a list of numbers: {error}", function=method) from error
        numbers = [score for score in processed if score is not None]
        if len(numbers) != len(scores):
            problem = f"received {len(scores)} scores and returned {len(numbers)} numbers"
            raise InvalidScoreError(problem, function=method)
        return numbers


def _process(post_process_scores: Callable[[list[float]], Any], scores: list[float]) -> Any:
    """Return what the method returns; the numbers of a generator as a list, with at most one number too many."""
    returned = post_process_scores(list(scores))
    # Here, the code of a generator runs in the thread and has a deadline; its exceptions are data.
    return list(itertools.islice(returned, len(scores) + 1)) if isinstance(returned, Iterator) else returned
