"""Turns verl's configuration into the settings of rewards: moves old keys, checks the options, and reads them once.

verl 0.9 accepts ``reward_model.*``, ``custom_reward_function.*`` and ``sandbox_fusion.*`` and ignores them. Here they
take effect: each moves to its successor under ``reward.*``. An unknown option, or one that contradicts its successor,
is an error.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from reward_loop._util.text import did_you_mean, listing
from reward_loop.config import RewardLoopConfig, RewardModelConfig
from reward_loop.errors import ConfigError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers import get as get_manager
from reward_loop.managers.builtin import RateLimitedConfig
from reward_loop.managers.registry import names as manager_names
from reward_loop.verl.mode_options import PIPELINE_MODE, check_mode, read_mode
from reward_loop.verl.reward_model import read_reward_model, warn_of_unused_options
from reward_loop.verl.settings import FunctionName, ManagerName, RewardSettings, added_options, defaults

logger = logging.getLogger(__name__)

VERL_GRAD_CLIP = 1.0
"""verl's default of ``grad_clip``. A value equal to it causes no warning: the user may not have set it."""

_MOVED = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.enable_resource_pool": "reward.reward_model.enable_resource_pool",
    "reward_model.n_gpus_per_node": "reward.reward_model.n_gpus_per_node",
    "reward_model.nnodes": "reward.reward_model.nnodes",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model.trust_remote_code": "reward_model.server.trust_remote_code",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "custom_reward_function.reward_kwargs": "reward.custom_reward_function.reward_kwargs",
    "sandbox_fusion.url": "reward.sandbox_fusion.url",
    "sandbox_fusion.max_concurrent": "reward.sandbox_fusion.max_concurrent",
    "sandbox_fusion.memory_limit_mb": "reward.sandbox_fusion.memory_limit_mb",
}
"""Old key -> its successor. ``reward_model.rollout.*`` moves to ``reward.reward_model.rollout.*``, key by key."""

_GROUPS = ("reward", "reward_model", "custom_reward_function", "sandbox_fusion", "reward_loop")
"""The option groups about rewards."""

_OPEN = {
    "reward.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
    "reward.reward_model.rollout.engine_kwargs",
    "reward_model.reward_kwargs",
    "reward_model.rollout.engine_kwargs",
    "custom_reward_function.reward_kwargs",
    "reward_model.server.env",
    "reward_model.server.engine_args",
    "reward_model.server.models",
    "reward_loop.components",
    "reward_loop.limits",
    "reward_loop.models",
}
"""Option groups with arbitrary keys, which the user chooses."""

_MODE_OPTIONS = f"trainer.v1.{PIPELINE_MODE}"

_UNUSED = {
    "reward_model.launch_reward_fn_async": "rollouts are scored while others are generated. Leave it out",
    "reward_model.model.external_lib": "import what the model needs in the module of your reward function",
}
"""Old key without a successor -> what to do instead."""

_GRAD_CLIPS = {
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
}
"""Key that verl's V1 trainer accepts and ignores -> the key that takes effect."""


def resolve(config: DictConfig, given: Collection[str] = ()) -> RewardSettings:
    """Fill in the options of reward_loop, move old keys to their successors, check, and return the settings of rewards.

    Call it once, in the process of the command. Other processes get the configuration from verl, and call `read`.

    Args:
        config: the composed configuration.
        given: the overrides of the command line. They take precedence over files, for old and new names of a key.

    Raises:
        ConfigError: a key is unknown, contradicts another, or cannot take effect; the message names the keys.
    """
    known = defaults()
    _fill_in(config)
    if unknown := list(_unknown_in(config)):
        raise ConfigError("\n".join(unknown))
    for key, advice in _UNUSED.items():
        if OmegaConf.select(config, key) is not None:
            raise ConfigError(f"{key} has no effect: {advice}")
    _warn_of_grad_clips(config)
    overridden = {override.lstrip("+~").partition("=")[0] for override in given}
    moved = dict(_MOVED)
    for key in config.reward_model.get("rollout") or {}:
        moved[f"reward_model.rollout.{key}"] = f"reward.reward_model.rollout.{key}"
    with open_dict(config):
        for old, new in moved.items():
            _move(config, old, new, known, overridden)
        if config.reward_model.reward_loop_module_path is not None and config.reward_model.reward_loop_source is None:
            config.reward.reward_manager.source = "importlib"
        if config.get("mini_batch_pipeline") is not None:
            _choose_pipeline(config)
        if config.reward_loop.log_dir is not None:
            # Reward workers may have another working directory.
            config.reward_loop.log_dir = os.path.abspath(config.reward_loop.log_dir)
    settings = read(config)
    warn_of_unused_options(config)
    return settings


def _fill_in(config: DictConfig) -> None:
    """Add the options of reward_loop that the files of the configuration do not have, and turn it on."""
    with open_dict(config):
        for group, added in added_options().items():
            given = config.get(group) or {}
            if not isinstance(given, Mapping):
                raise ConfigError(f"{group}={given}: it is a group of options, such as {group}.{next(iter(added))}")
            config[group] = OmegaConf.merge(added, given)
        if config.reward_model.use_reward_loop is None:
            config.reward_model.use_reward_loop = True
        config.reward_loop.pop("check")  # of the command alone


def read(config: DictConfig) -> RewardSettings:
    """Return the settings of rewards from a configuration after `resolve`.

    Raises:
        ConfigError: an option is malformed, contradicts another, or cannot take effect; the message names it.
    """
    _check(config)
    reward = config.reward
    manager = ManagerName(reward.reward_manager.name, reward.reward_manager.source, reward.reward_manager.module.path)
    custom = reward.custom_reward_function
    kwargs = custom.get("reward_kwargs")
    function = None
    if custom.path:
        # `judge:rubric` contains the name; verl's default name has no effect then.
        name = None if custom.name == "compute_score" and ":" in custom.path.removeprefix("pkg://") else custom.name
        function = FunctionName(custom.path, name, None if kwargs is None else OmegaConf.to_container(kwargs))
    cls = get_manager(manager.name) if manager.name in manager_names() else RewardLoopManagerBase
    options = cls.read_options(config)
    _check_manager_options(config, manager, function, options)
    mode = read_mode(config)
    check_mode(config, mode)
    model = read_reward_model(config, mode)
    if model is not None:
        _check_requests(model, options)
    settings = RewardSettings(
        config=config,
        options=options,
        manager=manager,
        function=function,
        num_workers=reward.num_workers,
        model=model,
        mode=mode,
    )
    if settings.scores_by_model and settings.model is not None and not settings.model.model_path:
        raise ConfigError(
            "reward_model.rollout.name=external without custom_reward_function.path: the reward is the output of the "
            "model, whose tokenizer and name are needed: set reward.reward_model.model_path; or the path of a function"
        )
    if settings.scores_by_model and manager.name != "naive":
        raise ConfigError(
            f"reward_model.reward_manager={manager.name} with reward_model.enable=True needs a function: set "
            "custom_reward_function.path. Without a function, the reward is the output of the reward model"
        )
    return settings


def without_reward(config: DictConfig) -> DictConfig:
    """Return a copy of the configuration with verl's own reward workers and servers disabled, for verl's trainer."""
    config = OmegaConf.create(OmegaConf.to_container(config))
    with open_dict(config):
        config.reward.num_workers = 0
        config.reward.reward_model.enable = False
        config.reward.reward_model.enable_resource_pool = False
        config.reward.custom_reward_function.path = None
        config.reward.reward_manager.source = "register"
        config.reward.reward_manager.name = "naive"
        config.reward_loop.job = None  # a secret, which verl's loggers would record
    return config


def unknown_overrides(words: Iterable[str]) -> Iterator[str]:
    """Yield a message for each override of a command line that sets an unknown option of rewards."""
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", key):
            continue
        given = OmegaConf.from_dotlist([f"{key}=null"])
        if key.partition(".")[0] in _GROUPS:
            yield from _unknown_in(given)
        elif (options := OmegaConf.select(given, _MODE_OPTIONS)) is not None:
            yield from _unknown(_MODE_OPTIONS, options, OmegaConf.select(added_options(), _MODE_OPTIONS))


def _unknown_in(config: DictConfig) -> Iterator[str]:
    known = defaults()
    for group in _GROUPS:
        yield from _unknown(group, config.get(group) or {}, known[group])


def _unknown(where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    names = list(known)  # `in` is false for mandatory values ("???")
    for key in given:
        path = f"{where}.{key}"
        if key not in names:
            yield f"{path}: unknown option{did_you_mean(str(key), names) or '.'} Known here: {listing(names)}"
            continue
        value = None if OmegaConf.is_missing(given, key) else given[key]
        if isinstance(value, Mapping) and path not in _OPEN:
            inner = None if OmegaConf.is_missing(known, key) else known[key]
            yield from _unknown(path, value, inner if isinstance(inner, Mapping) else {})


def _move(config: DictConfig, old: str, new: str, known: DictConfig, overridden: Collection[str]) -> None:
    value = OmegaConf.select(config, old)
    if value is None:
        return
    current, default = _select(config, new), _select(known, new)
    # If only one of the two is on the command line, that one takes effect.
    if new in overridden and old not in overridden:
        return
    decided = old in overridden and new not in overridden
    if not decided and current not in (default, value):
        raise ConfigError(f"{old}={value} contradicts {new}={current}: give one of them")
    OmegaConf.update(config, new, value, force_add=True)


def _warn_of_grad_clips(config: DictConfig) -> None:
    """Warn if gradients are not clipped at the norm that the user has set."""
    for ignored, effective in _GRAD_CLIPS.items():
        value, clipped_at = _select(config, ignored), _select(config, effective)
        if value is not None and clipped_at is not None and value not in (VERL_GRAD_CLIP, clipped_at):
            logger.warning(
                "%s=%s has no effect in verl's V1 trainer: gradients are clipped at %s=%s. Set that instead",
                *(ignored, value, effective, clipped_at),
            )


def _choose_pipeline(config: DictConfig) -> None:
    """Translate the top-level option ``mini_batch_pipeline`` of verl's recipe into the mode ``reward_pipeline``."""
    mode, wanted = config.trainer.v1.trainer_mode, config.pop("mini_batch_pipeline")
    if wanted is not False:
        if mode not in ("sync", PIPELINE_MODE):
            raise ConfigError(
                f"mini_batch_pipeline={wanted} contradicts trainer.v1.trainer_mode={mode}: it chooses "
                f"trainer.v1.trainer_mode={PIPELINE_MODE}. Leave one of them out"
            )
        config.trainer.v1.trainer_mode = PIPELINE_MODE
    config.trainer.v1[PIPELINE_MODE].mini_batch_pipeline = wanted


def _select(config: DictConfig, key: str) -> Any:
    # A missing mandatory value ("???") becomes None.
    return OmegaConf.select(config, key, throw_on_missing=False)


def _check(config: DictConfig) -> None:
    model = config.reward_model
    if model.use_reward_loop is not True:
        raise ConfigError(
            f"reward_model.use_reward_loop={model.use_reward_loop}: it must be True, or left out in the mode "
            f"{PIPELINE_MODE}. To train without reward_loop, leave out both"
        )
    if config.algorithm.adv_estimator == "gdpo":
        raise ConfigError(
            "algorithm.adv_estimator=gdpo: verl's V1 trainer passes estimators only the sum of a sample's rewards, and "
            "GDPO cannot normalise each of them. Use grpo, and combine the rewards in the function"
        )
    custom = config.reward.custom_reward_function
    if not custom.path and custom.get("reward_kwargs"):
        raise ConfigError(
            f"custom_reward_function.reward_kwargs={custom.reward_kwargs} has no effect without "
            "custom_reward_function.path, the file of the function that takes them"
        )
    if config.reward.num_workers < 1:
        raise ConfigError(f"reward.num_workers={config.reward.num_workers}: it must be at least 1")
    if not config.trainer.get("use_v1", True):
        raise ConfigError("trainer.use_v1=False: reward_loop works only with verl's V1 trainer")


def _check_manager_options(
    config: DictConfig, manager: ManagerName, function: FunctionName | None, options: RewardLoopConfig
) -> None:
    """Reject options that have no effect with the reward manager."""
    kwargs = config.reward.get("reward_kwargs")
    if kwargs and manager.name in manager_names() and manager.name != "dapo" and not manager.is_import_path:
        raise ConfigError(
            f"reward.reward_kwargs={kwargs} (or reward_model.reward_kwargs) has no effect with "
            f"reward_model.reward_manager={manager.name}: its options are for dapo, and for managers of your own. "
            "Arguments of the function are custom_reward_function.reward_kwargs"
        )
    components = options.components
    if manager.name == "composite" and function is not None and all(c.path for c in components.values()):
        raise ConfigError(
            f"custom_reward_function.path={function.path} has no effect: each of reward_loop.components has its own "
            "path. Leave it out, or leave out the path of the component that uses it"
        )
    if components and manager.name != "composite":
        raise ConfigError("reward_loop.components have an effect only with reward_model.reward_manager=composite")
    if manager.name not in ("rate_limited", "limited"):
        for key in RateLimitedConfig.model_fields:
            if config.reward.get(key) is not None:
                raise ConfigError(
                    f"reward.{key} has an effect only with reward_model.reward_manager=rate_limited; for others, set "
                    "reward_loop.limits and reward_loop.timeout"
                )


def _check_requests(model: RewardModelConfig, options: RewardLoopConfig) -> None:
    """Reject limits and deadlines of requests to the run's models that have no effect."""
    if options.models:
        raise ConfigError(
            "reward_loop.models: the run serves its models, so set max_concurrent and timeout in reward_model.server "
            "or reward_model.server.models.NAME"
        )
    try:
        requests = model.requests()
    except ConfigError as error:
        raise ConfigError(f"reward_model.server: {error}") from None
    functions = options.components.values() or [options]
    longest = max(function.timeout or options.timeout or math.inf for function in functions)
    for name, given in requests.items():
        where = f"reward_model.server.models.{name}" if name in model.models else "reward_model.server"
        most, timeout = given["max_concurrent"], given["timeout"]
        if options.job is not None and most is not None:
            raise ConfigError(
                f"{where}.max_concurrent={most} has no effect with reward_loop.job: the limits are those of the "
                f"service. Give it models={{{name!r}: {{'max_concurrent': {most}}}}}"
            )
        if timeout is not None and timeout > longest:
            raise ConfigError(
                f"{where}.timeout={timeout:g} is longer than the deadline of the function, reward_loop.timeout="
                f"{longest:g}: raise that, too"
            )
