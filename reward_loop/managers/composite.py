"""The manager `composite`: the weighted sum of several rewards of a sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError, InvalidScoreError
from reward_loop.limits.client import failure_bound
from reward_loop.limits.permit import DEFAULT, Limits
from reward_loop.managers.base import RewardLoopManagerBase, scoring_function
from reward_loop.managers.failures import decide
from reward_loop.managers.options import ComponentConfig, RewardLoopConfig
from reward_loop.managers.registry import register
from reward_loop.scoring import ScoringFunction, load_function
from reward_loop.scoring.results import failed_after, not_called
from reward_loop.types import MEASURED, PART_KEYS, RESERVED_KEYS, Outcome, RewardResult, RewardSample

_OF_THE_FUNCTION = frozenset({"timeout", "limit", "name", "reward_kwargs"})
"""Component options that have an effect only if the component has its own function (``path``)."""

_STOPS = ("raise", "stop")
"""The policies that stop the run."""


@register("composite")
class CompositeRewardLoopManager(RewardLoopManagerBase):
    """Returns the weighted sum of the rewards in ``reward_loop.components``.

    Each component has its own function, deadline and policies, and scores all samples, or those of some data sources,
    of training or of validation. Components are called concurrently, except that the components after a *gate* wait for
    its score. If the score is below the gate, or there is none, the later components are not called and their scores
    are 0.

    Extra info: ``<name>`` is the component's score, ``<name>/outcome`` its outcome, ``<name>/work_s`` and others its
    times, and ``<name>/<key>`` the other keys that its function returned; a key with one of these names becomes
    ``<name>/returned_<key>``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.options.components:
            raise ConfigError(
                "the manager `composite` needs reward_loop.components: a name for each reward, and at least its "
                "`path`. In a verl run: +reward_loop.components.form.path=rewards.py:form; with the command "
                "`reward-loop`: -O components.form.path=rewards.py:form"
            )
        if taken := (RESERVED_KEYS | PART_KEYS | {"score"}) & self.options.components.keys():
            raise ConfigError(f"reward_loop.components: the name {listing(taken)} is reserved: rename the component")
        if slashed := [name for name in self.options.components if "/" in name]:
            raise ConfigError(
                f"reward_loop.components: the name {listing(slashed)} contains a slash, which separates components "
                "from their keys: rename it"
            )
        named = {name for one in self.options.components.values() for name in _sources(one) or ()}
        if named == {"others"}:
            raise ConfigError(
                "reward_loop.components: data_sources=others are the data sources that no other component names, and "
                "no other component has data_sources. Leave it out"
            )
        self._chosen: dict[tuple[str, bool | None], dict[str, _Component]] = {}
        """The components by data source, and whether it is a validation."""
        self._components = {
            name: _Component(name, component, self.options, self.function, self.limits)
            for name, component in self.options.components.items()
        }
        self._check_place()

    @property
    def functions(self) -> dict[str, Any]:
        """The scoring function of each component, by its name."""
        return {name: component.function for name, component in self._components.items()}

    def _functions(self) -> Collection[Any]:
        # The base class asks while the components do not exist yet; `__init__` checks again when they do.
        return [component.function for component in getattr(self, "_components", {}).values()]

    async def score_one(self, sample: RewardSample) -> RewardResult:
        """Call the components, count the outcome of each, and sum up the weighted scores.

        If a component has neither a score nor a default score, its result becomes the result of the sample. If there
        are several such components, the first whose policy stops the run is used, otherwise the first.

        Raises:
            TooManyFailuresError: the share of failed calls among the recent calls of a component is too large.
        """
        components = self._components_of(sample.data_source, sample.validate)
        if not components:
            return not_called(replace(sample, error=self._why_not_scored(sample)))
        results = await self._results(sample, components)
        total = 0.0
        info: dict[str, Any] = {}
        decides: RewardResult | None = None
        stops = False
        for name, component in components.items():
            result = results.get(name)
            if result is None:
                info |= {name: 0.0, f"{name}/outcome": "gated"}
                continue
            component.failures.count(result)
            own = {"outcome": str(result.outcome), "error": result.error}
            own |= {key: getattr(result, key) for key in MEASURED}
            # The score has the name of the component. A function that returns a number has it as `acc`; `acc` of a dict
            # is the function's own.
            repeated = "score" if "score" in result.extra_info else "acc"
            for key, value in result.extra_info.items():
                if key != repeated:
                    info[f"{name}/returned_{key}" if key in own else f"{name}/{key}"] = value
            info |= {f"{name}/{key}": value for key, value in own.items() if key != "error" or value}
            if result.reward is not None:
                info[name] = result.reward
                total += component.config.weight * result.reward
            elif decides is None or (result.policy in _STOPS and not stops):
                decides, stops = result, result.policy in _STOPS
        called = results.values()
        if decides is None:
            decides = RewardResult(Outcome.SCORED, total)
            info = {"score": total, **info}
        return replace(
            decides,
            extra_info=info,
            work_s=sum(result.work_s for result in called),
            wait_s=sum(result.wait_s for result in called),
            queue_s=sum(result.queue_s for result in called),
            outage_s=sum(result.outage_s for result in called),
            attempts=max(result.attempts for result in called),
        )

    def _components_of(self, data_source: str, validate: bool | None) -> dict[str, _Component]:
        """Return the components that score such samples."""
        chosen = self._chosen.get((data_source, validate))
        if chosen is None:
            names = names_for(self.options.components, data_source, validate)
            chosen = self._chosen[data_source, validate] = {name: self._components[name] for name in names}
        return chosen

    def _why_not_scored(self, sample: RewardSample) -> str:
        """Return why no component scores such a sample."""
        if sample.validate is None:
            return (
                "reward_loop.components.NAME.phase has no effect here: it is not known whether a sample belongs to a "
                "validation. Leave the option out, or see where `validate` is known: docs/reward-functions.md"
            )
        return (
            f"none of reward_loop.components scores the data source {sample.data_source!r} in "
            f"{'validation' if sample.validate else 'training'}: add a component, or one with data_sources=others"
        )

    def _requires_of(self, data_source: str, validate: bool | None) -> frozenset[str]:
        components = self._components_of(data_source, validate).values()
        return frozenset().union(*(component.function.requires for component in components))

    async def _results(self, sample: RewardSample, components: Mapping[str, _Component]) -> dict[str, RewardResult]:
        calls: dict[str, asyncio.Task[RewardResult]] = {}
        context = {
            "reward_router_address": self.reward_router_address,
            "reward_model_tokenizer": self.reward_model_tokenizer,
        }
        try:
            async with asyncio.TaskGroup() as group:
                for name, component in components.items():
                    calls[name] = group.create_task(component.score(sample, context))
                    if component.config.gate is not None:
                        score = (await calls[name]).reward
                        if score is None or score < component.config.gate:
                            break
        # Not `except*`, which puts what is raised in it into a group again.
        except ExceptionGroup as errors:  # an error that stops the run
            raise errors.exceptions[0] from None
        return {name: call.result() for name, call in calls.items()}


def names_for(components: Mapping[str, ComponentConfig], data_source: str, validate: bool | None) -> list[str]:
    """Return the names of the components that score the samples of a data source, in training or in validation.

    There are none if a component is for one of the two, and ``validate`` is ``None`` (not known).
    """
    if validate is None and any(component.phase for component in components.values()):
        return []
    phases = (None, "validate" if validate else "train")
    named = {name for component in components.values() for name in _sources(component) or ()} - {"others"}
    is_other = not any(fnmatchcase(data_source, pattern) for pattern in named)
    found = []
    for name, component in components.items():
        sources = _sources(component)
        is_named = sources is None or any(fnmatchcase(data_source, pattern) for pattern in {*sources} - {"others"})
        if component.phase in phases and (is_named or (is_other and sources is not None and "others" in sources)):
            found.append(name)
    return found


def _sources(component: ComponentConfig) -> tuple[str, ...] | None:
    sources = component.data_sources
    return (sources,) if isinstance(sources, str) else sources


class _Component:
    """One component: its function, and its policies for unscored and failed samples."""

    def __init__(
        self, name: str, config: ComponentConfig, options: RewardLoopConfig, default: Any, limits: Limits
    ) -> None:
        where = f"reward_loop.components.{name}"
        own = {key: value for key in config.model_fields_set if (value := getattr(config, key)) is not None}
        if config.limit != DEFAULT and config.limit not in options.limits:
            raise ConfigError(
                f"{where}.limit: unknown limit {config.limit!r}"
                f"{did_you_mean(config.limit, options.limits) or '.'} Known: {listing(options.limits)}"
            )
        self._where = where
        self.config = config
        changed: dict[str, Any] = {
            key: own[key] for key in ("timeout", "on_failed", "on_unscored", "default_score") if key in own
        }
        self.options = options.model_copy(update=changed)
        if config.path is not None:
            function = load_function(config.path, config.name)
            if isinstance(function, ScoringFunction) and (
                ignored := sorted((_OF_THE_FUNCTION - {"name"}) & own.keys())
            ):
                raise ConfigError(
                    f"{where}.{ignored[0]} has no effect: {where}.path names a ScoringFunction, which has its own "
                    f"options. Set {ignored[0]} there"
                )
            self.function = scoring_function(
                RewardLoopManagerBase,
                function,
                self.options,
                reward_kwargs=config.reward_kwargs,
                limit=config.limit,
                limits=limits,
            )
            if getattr(self.function, "has_post_process", False):
                raise ConfigError(
                    f"{where}.path: post_process_scores of {self.function.name} would not be called: components get "
                    "the scores of one sample. Remove it, or give it to the function of the run, without a path: it "
                    "then gets the weighted sums of a group"
                )
        elif default is None:
            raise ConfigError(f"{where}.path is required: the run has no other function that this component could use")
        elif unused := sorted(_OF_THE_FUNCTION & own.keys()):
            raise ConfigError(f"{where}.{unused[0]} has no effect without {where}.path: set both, or remove it")
        else:
            self.function = default
        self.failures = failure_bound(options, limits, where)

    async def score(self, sample: RewardSample, context: Mapping[str, Any]) -> RewardResult:
        """Return the result of the function, with the component's policies."""
        started = time.perf_counter()
        result: RewardResult = await self.function(sample, **context)
        if keys := PART_KEYS & result.extra_info.keys():
            problem = f"returned {listing(keys)}; `composite` does not support dense rewards"
            result = failed_after(result, InvalidScoreError(problem, sample=sample, function=self._where))
        return decide(result, self.options, time.perf_counter() - started)
