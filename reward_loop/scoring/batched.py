"""Batched reward functions: one call scores several samples. Arguments and return value are lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError, InvalidScoreError, ScoringError
from reward_loop.processes.outcome import CallOutcome
from reward_loop.scoring.call import UserFunction
from reward_loop.scoring.outcome import failed_after, not_called, to_result
from reward_loop.scoring.signature import copied, resolve
from reward_loop.types import RewardResult, RewardSample

__all__ = ["CONTEXT", "FIELDS", "ListScoringFunction"]

FIELDS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""verl's names of the list arguments -> the `RewardSample` field that each list contains."""

CONTEXT = ("reward_router_address", "reward_model_tokenizer")
"""Other arguments that a batched function can declare."""

_NAMED = 8
"""The maximum number of sample uids that an error message lists."""


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
            ConfigError: the cache is enabled. Batched calls are almost never equal, so they are not cached.
        """
        if (given := options.get("options")) is not None and given.cache.enabled:
            raise ConfigError("reward_loop.cache.enabled: calls of a batched function are not cached: set it to false")
        super().__init__(resolve(function, reward_kwargs, (*FIELDS, *CONTEXT)), **options)

    @property
    def requires(self) -> frozenset[str]:
        """The fields of a sample whose lists the function's signature declares without a default."""
        return frozenset(FIELDS[name] for name in self._target.requires & FIELDS.keys())

    async def __call__(
        self,
        samples: Sequence[RewardSample],
        *,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> list[RewardResult]:
        """Score the samples in one call. Invalid samples (``sample.error`` is set) fail and are not passed to it."""
        valid = [sample for sample in samples if sample.error is None]
        context = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        results = iter(await self._score(valid, context) if valid else [])
        return [next(results) if sample.error is None else not_called(sample) for sample in samples]

    async def _score(self, samples: list[RewardSample], context: Mapping[str, Any]) -> list[RewardResult]:
        try:
            arguments = self._arguments(samples, context)
        except RecursionError:
            problem = "was not called: the extra_info of a sample is nested too deeply, or contains itself"
            outcome = CallOutcome.without_call(ScoringError(problem))
        else:
            outcome = await self._call(arguments, validate=samples[0].validate)
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

    def _arguments(self, samples: Sequence[RewardSample], context: Mapping[str, Any]) -> dict[str, Any]:
        target = self._target
        arguments = {**target.reward_kwargs, **{name: context[name] for name in CONTEXT if name in target.passes}}
        for name in target.passes & FIELDS.keys():
            arguments[name] = [getattr(sample, FIELDS[name]) for sample in samples]
        if "extra_infos" in arguments:
            arguments["extra_infos"] = [copied(extra_info) for extra_info in arguments["extra_infos"]]
        return arguments


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
