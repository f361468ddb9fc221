"""Batched reward functions: one call scores several samples. Arguments and return value are lists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError, InvalidScoreError
from reward_loop.limits.permit import Limits
from reward_loop.processes.invocation import CallOutcome
from reward_loop.scoring.call import ScoringFunction
from reward_loop.scoring.isolation import carry_mark
from reward_loop.scoring.outcome import failed_after, not_called, to_result
from reward_loop.scoring.signature import Target, copied, resolve
from reward_loop.types import Outcome, RewardResult, RewardSample

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


class ListScoringFunction:
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
        target = resolve(function, reward_kwargs, (*FIELDS, *CONTEXT))
        # Wrapped as a function of one sample; the real samples are in its extra_info["samples"].
        call = functools.partial(_call, target)
        carry_mark(target.call, to=call)
        of_one = replace(
            target,
            call=call,
            passes=frozenset({"extra_info", *CONTEXT}),
            requires=frozenset(),
            reward_kwargs={},
            post_process_scores=None,
            log=None,
        )
        self._function = ScoringFunction(of_one, **options)
        self.requires = frozenset(FIELDS[name] for name in target.requires & FIELDS.keys())

    @property
    def name(self) -> str:
        """The function's name and file, for messages."""
        return self._function.name

    @property
    def is_async(self) -> bool:
        """Whether the function is awaited on the event loop."""
        return self._function.is_async

    @property
    def in_processes(self) -> bool:
        """Whether the function runs in worker processes."""
        return self._function.in_processes

    @property
    def timeout(self) -> float | None:
        """Seconds from the start of a call to its deadline."""
        return self._function.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._function.timeout = seconds

    @property
    def limits(self) -> Limits:
        """The limits and the budget of the function's calls."""
        return self._function.limits

    def close(self) -> None:
        """Stop the function's worker processes, and close the limits that it created itself."""
        self._function.close()

    async def __call__(self, samples: Sequence[RewardSample], **context: Any) -> list[RewardResult]:
        """Score the samples in one call. Invalid samples (``sample.error`` is set) fail and are not passed to it.

        Args:
            samples: the samples to score.
            context: ``reward_router_address`` and ``reward_model_tokenizer``, passed to the function.
        """
        sound = [sample for sample in samples if sample.error is None]
        results = iter(await self._call(sound, context) if sound else [])
        return [next(results) if sample.error is None else not_called(sample) for sample in samples]

    async def _call(self, samples: list[RewardSample], context: dict[str, Any]) -> list[RewardResult]:
        names = [str(sample.uid) for sample in samples[:_NAMED]]
        if len(samples) > _NAMED:
            names.append(f"{len(samples) - _NAMED} more")
        together = RewardSample(
            "", uid=", ".join(names), extra_info={"samples": tuple(samples)}, validate=samples[0].validate
        )
        called = await self._function(together, **context)
        if called.outcome is not Outcome.SCORED:
            return [called] * len(samples)
        returned = called.extra_info["returned"]
        if not isinstance(returned, Sequence) or isinstance(returned, str | bytes) or len(returned) != len(samples):
            problem = f"must return a list of {len(samples)} scores, one for each sample"
            problem += f"; got {shorten(returned)}"
            return [
                failed_after(called, InvalidScoreError(problem, sample=sample, function=self.name))
                for sample in samples
            ]
        return [self._result(sample, item, called) for sample, item in zip(samples, returned, strict=True)]

    def _result(self, sample: RewardSample, item: Any, called: RewardResult) -> RewardResult:
        value, exception = (None, item) if isinstance(item, BaseException) else (item, None)
        outcome = CallOutcome(
            value,
            exception,
            called.seconds,
            attempts=called.attempts,
            waited=called.wait_seconds,
            queued=called.queue_seconds,
        )
        return to_result(outcome, sample, self.name)


def _call(
    target: Target, *, extra_info: Mapping[str, Any], reward_router_address: str | None, reward_model_tokenizer: Any
) -> Any:
    """Call the batched function with the samples in ``extra_info["samples"]``."""
    samples = extra_info["samples"]
    passes = target.passes
    arguments = dict(target.reward_kwargs)
    for name in passes & FIELDS.keys():
        arguments[name] = [getattr(sample, FIELDS[name]) for sample in samples]
    if "extra_infos" in passes:
        arguments["extra_infos"] = [copied(sample.extra_info) for sample in samples]
    if "reward_router_address" in passes:
        arguments["reward_router_address"] = reward_router_address
    if "reward_model_tokenizer" in passes:
        arguments["reward_model_tokenizer"] = reward_model_tokenizer
    returned = target.call(**arguments)
    return _when_ready(returned) if inspect.isawaitable(returned) else _packed(returned)


async def _when_ready(returned: Awaitable[Any]) -> dict[str, Any]:
    return _packed(await returned)


def _packed(returned: Any) -> dict[str, Any]:
    # Convert arrays and tensors to lists.
    return {"score": 0.0, "returned": returned.tolist() if hasattr(returned, "tolist") else returned}
