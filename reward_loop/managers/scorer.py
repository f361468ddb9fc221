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


async def reward_of(manager: Any, sample: Any, name: object) -> Reward:
    """Return the reward of a sample, or of a row of verl's ``DataProto``, from a manager that may be the user's own.

    Messages contain the ``name``. A score that is not a finite number becomes a masked reward of a *failed* sample.

    Raises:
        RewardLoopError: an error that stops the run; or ``run_single`` raised another exception, which would occur for
            every sample, or did not return a reward.
    """
    try:
        reward: Reward = await manager.run_single(sample)
    except RewardLoopError:
        raise
    except Exception as error:
        cause = f"raised {type(error).__name__}: {error}"
        raise RewardLoopError(f"{name}: {type(manager).__name__}.run_single {cause}") from error
    is_reward = isinstance(reward, Mapping) and "reward_score" in reward
    if is_reward and isinstance(reward.get("reward_extra_info") or {}, Mapping):
        # NaN must not reach a tensor. Arrays and tensors with one element count as numbers, as in verl.
        score: Any = reward["reward_score"]
        if finite_number(score[0] if getattr(score, "shape", None) == (1,) else score) is None:
            return RewardResult.of(reward, str(getattr(sample, "uid", None) or name)).to_reward()
        return reward
    cause = f"returned {shorten(reward)}, not a dict with reward_score and reward_extra_info"
    raise RewardLoopError(f"{name}: {type(manager).__name__}.run_single {cause}")


def scores_groups(manager: Any) -> bool:
    """Return whether the manager, or ``post_process_scores`` of its function, needs all samples of a group."""
    return bool(getattr(manager, "needs_group", False))
