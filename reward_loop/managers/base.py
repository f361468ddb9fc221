"""The base class of reward managers: from a sample to a reward."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

from reward_loop._util.addresses import checked_address
from reward_loop.config import parse
from reward_loop.errors import BudgetSpentError, ConfigError, ScoringError
from reward_loop.limits.local import Limits, LocalLimits
from reward_loop.managers.groups import Call, Groups
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.records import ActiveSample, Records, records, watch, watched_loops
from reward_loop.scoring import ListScoringFunction, ScoringFunction, load_object
from reward_loop.scoring.results import check_result, failed_after
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

CONVERTER = "reward_loop.verl.samples:VerlSamples"
"""The class that converts the data and the configuration of verl, which is loaded only for these."""

OF_VERL = frozenset({"actor_rollout_ref", "reward", "reward_loop", "reward_model", "trainer"})
"""Groups of verl's configuration. A mapping without them has options of the reward loop, which need no verl."""

_SHARED = ("limits", "budget", "max_failed_share", "min_samples_for_failed_share", "failed_share_window")
"""The options that managers must have in common to share limits."""

_values = attrgetter(*RewardResult.__dataclass_fields__)


class RewardLoopManagerBase:
    """Base class of reward managers. `run_single` calls `to_sample`, `score_one` and `to_reward`; override any of them.

    The constructor takes the keywords that verl passes, so verl can load a manager by itself.

    Example::

        @register("clipped")
        class ClippedManager(RewardLoopManagerBase):
            async def score_one(self, sample: RewardSample) -> RewardResult:
                result = await super().score_one(sample)
                return result if result.score is None else replace(result, score=min(result.score, 1.0))
    """

    function_type: ClassVar[type[ScoringFunction] | type[ListScoringFunction]] = ScoringFunction
    """The class that calls the user's function: `ScoringFunction`, or `ListScoringFunction` for batched functions."""

    needs_group: bool = False
    """Whether one manager must see all samples of a prompt: also if the function has ``post_process_scores``."""

    def __init__(
        self,
        config: RewardLoopConfig | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        limits: Limits | None = None,
    ) -> None:
        """Read the options, and inspect the function's signature.

        Args:
            config: a `RewardLoopConfig`, a mapping of its options, or verl's whole configuration, of which the group
                ``reward_loop`` is read.
            tokenizer: decodes responses; needed only for verl's batches.
            compute_score: the reward function in any form that `ScoringFunction` accepts, or a `function_type` object,
                which keeps its own deadline and threads. ``None`` is valid only for managers that do not call it.
            reward_router_address: ``host:port`` of the reward model router, passed to the function.
            reward_model_tokenizer: the reward model's tokenizer, passed to the function.
            limits: limits and budget shared with other managers; the caller closes them. By default the limits of
                ``compute_score`` if it is a `function_type` object with the same limit options, otherwise new ones.

        Raises:
            ConfigError: an option or the address is invalid.
            FunctionLoadError: the function requires an argument that the reward loop does not provide.
        """
        self.config = config
        given = load_object(CONVERTER).options_of(config) if self.of_verl else config
        self.options = parse(RewardLoopConfig, given, "reward_loop")
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address = reward_router_address and checked_address(reward_router_address)
        self.reward_model_tokenizer = reward_model_tokenizer
        limits = limits or limits_of(compute_score, self.options)
        self._owns_limits = limits is None
        self.limits = limits or LocalLimits(self.options)
        self.function: Any = None
        if compute_score is not None:
            self.function = scoring_function(type(self), compute_score, self.options, limits=self.limits)
        self.groups: Groups | None = None
        """Collects the samples of each prompt; ``None`` if each is scored alone."""
        if self.post_processes:
            self.needs_group = True
            self.groups = self.collect_groups(self.function.post_process_scores, f"post_process_scores of {self.name}")
        self.records = open_records(self.options)
        if self.of_verl:
            self.converter.check()

    @functools.cached_property
    def of_verl(self) -> bool:
        """Whether the configuration is that of verl."""
        return isinstance(self.config, Mapping) and not OF_VERL.isdisjoint(self.config)

    @functools.cached_property
    def converter(self) -> Any:
        """Converts what the manager gets from verl, and its results for verl."""
        return load_object(CONVERTER)(self)

    async def run_single(self, data: Any) -> Reward:
        """Return the reward of one sample.

        Args:
            data: a `RewardSample`, or verl's ``DataProto``, of which only the last row is scored.

        Returns:
            ``{"reward_score": float, "reward_extra_info": dict}``, as in verl. The extra info contains what the
            function returned, and the keys that docs/outcomes.md describes.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
            TooManyFailuresError: the share of failed samples among the recent samples is too large.
        """
        return self.to_reward(await self.score(await self.to_sample(data)))

    async def to_sample(self, data: Any) -> RewardSample:
        """Return the sample in ``data``: a `RewardSample`, or the decoded last row of verl's ``DataProto``.

        The sample's ``error`` is set, so that it fails without a call, if the row lacks what the function requires.

        Raises:
            ConfigError: ``data`` is a ``DataProto``, and the manager has no tokenizer.
        """
        if not isinstance(data, RewardSample):
            sample: RewardSample = await self.converter.to_sample(data)
            return sample
        if self.changes_samples and data.response is None:
            return replace(data, response=data.solution_str)
        return data

    @functools.cached_property
    def changes_samples(self) -> bool:
        """Whether `to_sample` is overridden, so that records need the text of the policy beside that it returns."""
        return self.records is not None and type(self).to_sample is not RewardLoopManagerBase.to_sample

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample: call `score_one`, check its result, apply the policies, record and count it."""
        # Not in the constructor: a process that only creates a manager gets no thread.
        if asyncio.get_running_loop() not in watched_loops:  # a sample needs no call of the watchdog
            watch()
        with ActiveSample(sample, self.name, self.options.watchdog_s, self.records is not None) as active:
            if self.groups is None:
                result = check_result(sample, await self.score_one(sample))
            else:
                result = await self._score_member(sample, self.groups)
            result = decide(result, self.options, time.perf_counter() - active.started)
            if self.records is not None:
                self.records.write_sample(active, result, self.options.record.full)
        self.limits.count(result)
        return result

    def score_one(self, sample: RewardSample) -> Awaitable[RewardResult]:
        """Call the function for one sample. Errors in the function become *failed* results, not exceptions.

        If its class has ``post_process_scores``, the result is that of this method, when all samples of the group are
        scored.
        """
        # The function's coroutine directly: no extra coroutine per sample in flight.
        return self._with_group(sample) if self.post_processes else self._call(sample)

    async def _score_member(self, sample: RewardSample, groups: Groups) -> RewardResult:
        with groups.member(sample) as joined:
            result = check_result(sample, await self.score_one(sample))
            if self.post_processes and not joined():  # an override has not called the method of this class
                result = check_result(sample, await self._post_process(sample, result))
        return result

    def score_many(self, samples: list[RewardSample]) -> Awaitable[list[RewardResult]]:
        """Call a batched function once for several samples; return one result per sample, in order."""
        return self._call(samples)

    def to_reward(self, result: RewardResult) -> Reward:
        """Return the reward of a result of `score`.

        Raises:
            ScoringError: the sample has no score, and the policy is ``raise``.
        """
        reward: Reward = self.converter.to_reward(result) if self.of_verl else result.to_reward()
        return reward

    def _call(self, what: Any) -> Awaitable[Any]:
        if self.function is None:
            raise ConfigError(f"{type(self).__name__} has no compute_score: pass one to its constructor")
        return self.function(
            what,
            reward_router_address=self.reward_router_address,
            reward_model_tokenizer=self.reward_model_tokenizer,
        )

    @functools.cached_property
    def post_processes(self) -> bool:
        """Whether the function is a class with ``post_process_scores``, which the manager calls for each group."""
        return isinstance(self.function, ScoringFunction) and self.function.has_post_process

    def collect_groups(self, call: Call, who: str) -> Groups:
        """Return a collector of groups, with the sizes and the timeout of the options."""
        size = self.options.group.size or (self.converter.group_size if self.of_verl else None)
        return Groups(call, size, self.options.group.timeout, who)

    async def _with_group(self, sample: RewardSample) -> RewardResult:
        return await self._post_process(sample, check_result(sample, await self._call(sample)))

    async def _post_process(self, sample: RewardSample, result: RewardResult) -> RewardResult:
        """Return a result with its score after ``post_process_scores``, when the whole group is scored."""
        assert self.groups is not None
        if result.score is None:
            return result
        try:
            score: float = await self.groups.join(result.score)
        except ScoringError as error:
            failure = error.about(sample)
            failure.__cause__ = error
            return failed_after(result, failure)
        return replace(result, score=score, extra_info={"raw_score": result.score, **result.extra_info})

    @functools.cached_property
    def name(self) -> str:
        """The name of the function, or of the manager class without one; for messages and logs."""
        return self.function.name if self.function else type(self).__name__

    @functools.cached_property
    def requires(self) -> frozenset[str]:
        """The provided arguments that the user's function declares without a default."""
        return frozenset() if self.function is None else self.function.requires

    def close(self) -> None:
        """End the worker processes of the function, and close the limits that the manager has created.

        Blocks until the processes have ended and all records are written: do not call it on the event loop.
        """
        # Each part before what it uses: calls of the function hold permits, and all write records.
        if self.function is not None:
            self.function.close()
        if self._owns_limits:
            self.limits.close()
        if self.records is not None:
            self.records.flush()

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: list[float]) -> Any:
        """Return token-level rewards of a ``DataProto``: each row's score at its last response token. verl calls it."""
        return load_object(CONVERTER).assemble_rm_scores(data, scores)


def decide(result: RewardResult, options: RewardLoopConfig, total_s: float = 0.0) -> RewardResult:
    """Return a result with what the policies make of it: its ``reward``, whether it is ``masked``, and the ``policy``.

    Nothing else applies the policies. ``total_s`` is that of the result.
    """
    # Not `replace`, which takes five times as long, for each sample.
    decided = RewardResult(*_values(result))
    decided.reward, decided.total_s = result.score, total_s
    if result.score is None:
        policy = result.policy or (options.on_failed if result.outcome is Outcome.FAILED else options.on_unscored)
        # Not a failure of the function: the user chose separately what happens at the cap.
        if isinstance(result.exception, BudgetSpentError):
            policy = options.budget.at_cap
        decided.policy, decided.masked = policy, policy == "mask"
        decided.reward = options.default_score if policy == "default" else None
    return decided


def scoring_function(
    manager: type,
    function: Any,
    options: RewardLoopConfig,
    *,
    reward_kwargs: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
) -> Any:
    """Return the scoring function for a manager class: for single samples or for batches, by its ``function_type``.

    Args:
        manager: the manager class.
        function: the user's function, or a scoring function, which is returned unchanged.
        options: the options of the scoring function.
        reward_kwargs: configured arguments of the function.
        limits: the limits that the scoring function shares. A scoring function passed as ``function`` keeps its own.

    Raises:
        FunctionLoadError: the function requires an argument that the reward loop does not provide.
        ConfigError: ``reward_kwargs`` are given, but ``function`` is already a scoring function.
    """
    kind = getattr(manager, "function_type", ScoringFunction)
    if not isinstance(function, kind):
        return kind(function, reward_kwargs=reward_kwargs, options=options, limits=limits)
    if reward_kwargs:
        raise ConfigError(
            f"reward_kwargs have no effect: {function.name} is a {kind.__name__} already; pass them to its constructor"
        )
    return function


def limits_of(function: Any, options: RewardLoopConfig) -> Limits | None:
    """Return the limits of a scoring function if their options equal ``options``, otherwise ``None``."""
    limits: Limits | None = getattr(function, "limits", None)
    if not isinstance(limits, Limits):
        return None
    same = all(getattr(limits.options, name) == getattr(options, name) for name in _SHARED)
    return limits if same else None


def open_records(options: RewardLoopConfig) -> Records | None:
    """Return this process's writer for ``log_dir``; ``None`` if it is not set."""
    return records(options.log_dir, options.record.max_bytes) if options.log_dir else None
