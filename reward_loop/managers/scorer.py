"""Loads a reward function and the manager that calls it, each by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward_loop import managers
from reward_loop._util.text import shorten
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.options import RewardLoopConfig
from reward_loop.managers.registry import with_options_of
from reward_loop.scoring import load_function
from reward_loop.types import Reward, RewardResult, finite_number


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward manager, and the user's function that it calls."""

    loaded: Any
    """The loaded function."""
    function: Any
    """The scoring function that calls it."""
    manager: Any
    requires: frozenset[str]
    """The fields of a sample that the function requires."""


def load_scorer(
    spec: Any,
    manager: str,
    options: RewardLoopConfig,
    *,
    reward_kwargs: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    router_address: str | None = None,
    reward_model_tokenizer: Any = None,
) -> Scorer:
    """Load a function, and create the manager that calls it.

    Args:
        spec: the function, or its name: ``file.py:name`` or ``package.module:name``.
        manager: name or import path of the manager.
        options: the options of the run.
        reward_kwargs: configured arguments of the function.
        tokenizer, router_address, reward_model_tokenizer: see `RewardLoopManagerBase`.

    Raises:
        ConfigError: the manager does not exist or cannot be created, or its options are invalid; the function is
            missing; the manager is ``dapo``, whose options only verl's configuration has.
        FunctionLoadError: a function cannot be found, or cannot be called with the arguments of the reward loop.
    """
    cls: Any = managers.get(manager)
    if spec is None:
        raise ConfigError("name the function: file.py:name or package.module:name")
    if not options.skip_special_tokens and tokenizer is None:
        raise ConfigError(
            "skip_special_tokens=False has an effect only in a verl run: here the responses are texts already. Leave "
            "it out, or take the argument response_ids"
        )
    if cls is managers.DAPORewardLoopManager:
        raise ConfigError(
            "the manager `dapo` has its options in verl's configuration (reward.reward_kwargs.overlong_buffer_cfg), so "
            "it would add no penalty here. Use `naive`; for the penalty, your function can take the argument "
            "response_ids"
        )
    options = with_options_of(manager, options)
    loaded = load_function(spec) if isinstance(spec, str) else spec
    function = managers.scoring_function(cls, loaded, options, reward_kwargs=reward_kwargs)
    try:
        made = cls(
            config=options,
            tokenizer=tokenizer,
            compute_score=function,
            reward_router_address=router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
    except RewardLoopError:
        raise
    # `SystemExit`, too: a class of the user that calls `sys.exit` would end the command without a message.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the manager {manager} cannot be created: {type(error).__name__}: {error}") from error
    requires = getattr(made, "requires", function.requires)
    return Scorer(loaded, function, made, requires)


async def scored(manager: Any, sample: Any, name: object) -> tuple[RewardResult, Reward]:
    """Return the result and the reward of a sample, or of a row of verl's ``DataProto``.

    The manager may be the user's own, of which only ``run_single`` is known: a score that is not a finite number then
    becomes a masked reward of a *failed* sample. Messages contain the ``name``.

    Raises:
        RewardLoopError: an error that stops the run; or ``run_single`` raised another exception, which would occur for
            every sample, or did not return a reward.
    """
    try:
        if returns_results(manager):
            result = await manager.score(await manager.to_sample(sample))
            return result, manager.to_reward(result)
        reward: Reward = await manager.run_single(sample)
    except RewardLoopError:
        raise
    except Exception as error:
        cause = f"raised {type(error).__name__}: {error}"
        raise RewardLoopError(f"{name}: {type(manager).__name__}.run_single {cause}") from error
    is_reward = isinstance(reward, Mapping) and "reward_score" in reward
    if not is_reward or not isinstance(reward.get("reward_extra_info") or {}, Mapping):
        cause = f"returned {shorten(reward)}, not a dict with reward_score and reward_extra_info"
        raise RewardLoopError(f"{name}: {type(manager).__name__}.run_single {cause}")
    score: Any = reward["reward_score"]
    if getattr(score, "shape", None) == (1,):  # arrays and tensors with one element count as numbers, as in verl
        score = score[0]
    read = Reward(reward_score=score, reward_extra_info=reward.get("reward_extra_info") or {})
    result = RewardResult.of(read, str(getattr(sample, "uid", None) or name))
    # NaN must not reach a tensor.
    return result, result.to_reward() if finite_number(score) is None else reward


def returns_results(manager: Any) -> bool:
    """Return whether the rewards of a manager are those of the results of its ``score``."""
    base = managers.RewardLoopManagerBase
    return isinstance(manager, base) and all(
        getattr(getattr(manager, name), "__func__", None) is getattr(base, name) for name in ("run_single", "to_reward")
    )


def scores_groups(manager: Any) -> bool:
    """Return whether the manager, or ``post_process_scores`` of its function, needs all samples of a group."""
    return bool(getattr(manager, "needs_group", False))
