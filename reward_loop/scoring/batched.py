"""A reward function of several samples: it takes lists, and returns a list."""

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
from reward_loop.scoring.call import ScoringFunction, copied
from reward_loop.scoring.isolation import carry_mark
from reward_loop.scoring.outcome import failed_after, not_called, to_result
from reward_loop.scoring.signature import Target, resolve
from reward_loop.types import Outcome, RewardResult, RewardSample

__all__ = ["CONTEXT", "FIELDS", "ListScoringFunction"]

FIELDS = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
"""The lists that a function can take, by verl's names, and the field of each sample that they hold."""

CONTEXT = ("reward_router_address", "reward_model_tokenizer")
"""What it can take besides."""

_NAMED = 8
"""How many samples of a call a message names."""


class ListScoringFunction:
    """A reward function that takes ``data_sources``, ``solution_strs``, ``ground_truths`` and ``extra_infos``.

    Awaiting ``function(samples)`` gives a `RewardResult` for each of them, in order. The function returns a list, with
    for each sample what a `ScoringFunction` may return, or an exception, as `asyncio.gather` does. One call has one
    deadline and one thread; where it ends badly, all its samples have failed.
    """

    def __init__(self, function: Any, *, reward_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Read the signature.

        Args:
            function: as in `ScoringFunction`, but of lists.
            reward_kwargs: configured arguments of the function, or of its class.
            options: those of `ScoringFunction`.

        Raises:
            FunctionLoadError: it cannot be called with what the reward loop provides.
            ConfigError: its calls are to be cached; they are hardly ever equal.
        """
        if (given := options.get("options")) is not None and given.cache.enabled:
            raise ConfigError("reward_loop.cache.enabled: calls of a function of lists are not cached; leave it off")
        target = resolve(function, reward_kwargs, (*FIELDS, *CONTEXT))
        # As a function of one sample, which carries the others.
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
        """Function and file, for messages."""
        return self._function.name

    @property
    def is_async(self) -> bool:
        """Whether it is awaited on the loop."""
        return self._function.is_async

    @property
    def in_processes(self) -> bool:
        """Whether it runs in processes of its own."""
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
        """The limits and the budget of its calls."""
        return self._function.limits

    def close(self) -> None:
        """End the processes of the function, and close its own limits."""
        self._function.close()

    async def __call__(self, samples: Sequence[RewardSample], **context: Any) -> list[RewardResult]:
        """Score samples in one call; those that are broken fail without it.

        Args:
            samples: what to score.
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
            problem = f"was given {len(samples)} samples, and must return a list of as many scores"
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
    """Call the function of lists with the samples that a single one carries."""
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
    # Arrays and tensors become lists.
    return {"score": 0.0, "returned": returned.tolist() if hasattr(returned, "tolist") else returned}
