"""Reward functions of one sample and of batches. Every sample gets exactly one result, also when the function fails."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import InvalidScoreError, RewardFunctionError
from reward_loop.limits.call import Call
from reward_loop.processes.outcome import CallOutcome, describe_exception
from reward_loop.scoring.call_function import UserFunction
from reward_loop.scoring.results import failed_after, normalise, not_called, to_result
from reward_loop.scoring.signature import resolve
from reward_loop.types import RewardResult, RewardSample

_NAMED = 8
"""The maximum number of sample uids that an error message lists."""


class ScoringFunction(UserFunction):
    """Calls the user's reward function for single samples, with a deadline, retries and limits.

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
        return self._target.has_post_process

    async def __call__(
        self,
        sample: RewardSample,
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> RewardResult:
        """Score one sample.

        Raises:
        """
        if (sample := self._checked(sample)).error is not None:
            return not_called(sample)
        arguments = functools.partial(self._target.arguments, sample, reward_router_address, reward_model_tokenizer)
        return to_result(await self._call(arguments, sample.global_steps), sample, self.name)

    async def post_process_scores(self, scores: list[float]) -> list[float]:
        """Return the scores after the class's ``post_process_scores``, or unchanged if the class has none.

        It has the deadline of a call, but no permits: `reward_loop.limit` has no effect in it.

        Raises:
            ScoringError: the method raised, ran past the deadline, or did not return one finite number per score.
        """
        if not self._target.has_post_process:
            return scores
        method = f"post_process_scores beside {self.name}"
        call = Call(self.limits, self.timeout)
        process = functools.partial(_process, self._made().post_process_scores, scores)
        try:
            outcome = await self._call_in_thread(call, process, {})
        except (OSError, RuntimeError) as error:
            outcome = self._without_end(error, call)
        finally:
            call.end(abandoned=False)
        if outcome.error is not None:
            raise outcome.error.about(function=method)
        if outcome.exception is not None:
            problem = f"raised {describe_exception(outcome.exception)}"
            raise RewardFunctionError(problem, function=method) from outcome.exception
        # In these, numbers belong to no position: they would become the scores of other samples.
        if isinstance(outcome.value, Mapping | Set):
            problem = f"must return a list of numbers: it returned a {type(outcome.value).__name__}"
            raise InvalidScoreError(problem, function=method)
        try:
            processed = [normalise(score)[0] for score in outcome.value]
        except (InvalidScoreError, TypeError) as error:
            raise InvalidScoreError(f"must return a list of numbers: {error}", function=method) from error
        numbers = [score for score in processed if score is not None]
        if not len(numbers) == len(processed) == len(scores):
            missing = len(processed) - len(numbers)
            what = f"{len(processed)} values, {missing} of them None" if missing else f"{len(numbers)} numbers"
            raise InvalidScoreError(f"received {len(scores)} scores and returned {what}", function=method)
        return numbers


def _process(post_process_scores: Callable[[list[float]], Any], scores: list[float]) -> Any:
    """Return what the method returns; the numbers of a generator as a list, with at most one number too many."""
    returned = post_process_scores(list(scores))
    # Here, the code of a generator runs in the thread and has a deadline; its exceptions are data.
    # One more than expected shows a wrong number, also of a generator that never ends.
    return list(itertools.islice(returned, len(scores) + 1)) if isinstance(returned, Iterator) else returned


class ListScoringFunction(UserFunction):
    """A batched reward function: it takes ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos``.

    ``await function(samples)`` returns one `RewardResult` per sample, in order. The user's function returns a list of
    the same length. Each item is a value that a `ScoringFunction` accepts, or an exception (as from
    `asyncio.gather` with ``return_exceptions=True``). A call has one deadline and one thread. If the call fails, all
    its samples fail.
    """

    def __init__(self, function: Any, *, reward_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Inspect the function's signature.

        Args:
            function: as in `ScoringFunction`, but with list arguments.
            reward_kwargs: configured arguments of the function, or of its class.
            options: the keyword options of `ScoringFunction`.

        Raises:
            FunctionLoadError: the function requires an argument that the reward loop does not provide.
        """
        super().__init__(resolve(function, reward_kwargs, of_lists=True), **options)

    async def __call__(
        self,
        samples: Sequence[RewardSample],
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> list[RewardResult]:
        """Score the samples in one call. Invalid samples (``sample.error`` is set) fail and are not passed to it."""
        samples = [self._checked(sample) for sample in samples]
        valid = [sample for sample in samples if sample.error is None]
        context = {"router_address": reward_router_address, "tokenizer": reward_model_tokenizer}
        results = iter(await self._score(valid, context) if valid else [])
        return [next(results) if sample.error is None else not_called(sample) for sample in samples]

    async def _score(self, samples: list[RewardSample], context: Mapping[str, Any]) -> list[RewardResult]:
        arguments = functools.partial(self._target.list_arguments, samples, **context)
        outcome = await self._call(arguments, samples[0].global_steps)
        if outcome.exception is not None or outcome.error is not None:
            return [to_result(outcome, _together(samples), self.name)] * len(samples)
        try:
            values = _items(outcome.value, len(samples))
        except InvalidScoreError as error:
            called = to_result(outcome, samples[0], self.name)
            return [failed_after(called, error.about(sample, self.name)) for sample in samples]
        return [
            to_result(_outcome_of(value, outcome), sample, self.name)
            for sample, value in zip(samples, values, strict=True)
        ]


def _together(samples: Sequence[RewardSample]) -> RewardSample:
    """Return a sample that names all samples of a call in messages."""
    names = [str(sample.uid) for sample in samples[:_NAMED]]
    if len(samples) > _NAMED:
        names.append(f"{len(samples) - _NAMED} more")
    return RewardSample("", uid=", ".join(names))


def _items(returned: Any, count: int) -> Sequence[Any]:
    """Return the items that a function returned for ``count`` samples; arrays and tensors as lists.

    Raises:
        InvalidScoreError: it returned something else.
    """
    try:
        items = returned.tolist() if hasattr(returned, "tolist") else returned
    except Exception as error:  # for instance a tensor on a failed device
        kind = type(returned).__name__
        raise InvalidScoreError(f"returned a {kind} that cannot be read: {shorten(error)}") from error
    if not isinstance(items, Sequence) or isinstance(items, str | bytes) or len(items) != count:
        raise InvalidScoreError(f"must return a list of {count} scores, one for each sample; got {shorten(items)}")
    return items


def _outcome_of(item: Any, call: CallOutcome) -> CallOutcome:
    """Return the outcome of one sample of a call."""
    return replace(call, value=None, exception=item) if isinstance(item, BaseException) else replace(call, value=item)
