"""The options of a verl run that concern rewards: old keys are moved, all are checked, and read once.

verl 0.9 accepts ``reward_model.*``, ``custom_reward_function.*`` and ``sandbox_fusion.*`` and ignores them. Here they
take effect: each moves to its successor under ``reward.*``. Hydra reports unknown options of verl. Does not import
verl.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field

from reward_loop.config import Config, RewardLoopConfig, RewardModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.managers import get as get_manager
from reward_loop.managers.registry import OPTIONS, is_known
from reward_loop.scoring import load_function
from reward_loop.verl.installed import verls_defaults
from reward_loop.verl.run.reward_model import OWN_GPUS, read_reward_model
from reward_loop.verl.samples import options_of

logger = logging.getLogger(__name__)

PIPELINE_MODE = "reward_pipeline"
"""The name of our trainer mode, as in ``trainer.v1.trainer_mode=reward_pipeline``."""

REWARD_QUEUE = "trainer.v1.separate_async.reward_queue"
"""The options of the queue between generation and judging."""

MINI_BATCH_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"})
"""Advantage estimators that use only the samples of one group. The others whiten advantages over the whole batch, or
count over it: ``gpg`` counts the non-zero scores."""


class SamplerOptions(Config):
    """``trainer.v1.sampler``, which also has options of verl."""

    # verl polls every 2 s, which is a large part of a short step.
    poll_interval_s: float = Field(default=0.1, gt=0, allow_inf_nan=False, strict=True)
    """Seconds between two polls of verl's replay buffer for finished rollouts."""

    stall_timeout_s: float | None = Field(default=3600.0, gt=0)
    """The run stops when training or validation waits for this many seconds without progress: no prompt has started or
    ended, and no reward was requested or has arrived; or for the policy's weights to reach the rollout servers. `null`
    for no limit."""


class PipelineOptions(Config):
    """``trainer.v1.reward_pipeline``."""

    mini_batch_pipeline: bool = True
    """Update on every mini-batch of groups as soon as its rewards have arrived."""

    one_step_off_policy: bool = True
    """Generate the next step's rollouts before this step's update."""

    max_ahead: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """With `algorithm.filter_groups`: at most this many times `data.train_batch_size` prompts are begun because the
    filter will probably remove others, as it did in the last steps. What a step does not need belongs to the next one.
    `0`: groups are replaced only after they are filtered."""


class RewardQueueOptions(Config):
    """``trainer.v1.separate_async.reward_queue``."""

    capacity: int | None = Field(default=None, ge=1)
    """The largest number of rollouts that are being generated or wait for a judge. A prompt's rollouts start only when
    there is room for all of them. By default the number that verl has in flight: a training step's rollouts, and those
    of `num_warmup_batches`. Each agent loop worker has room for one prompt's rollouts, also if that is more."""

    in_flight: int | None = Field(default=None, ge=1)
    """The largest number of rollouts that are judged at the same time, oldest first; the others wait in the queue. By
    default the rollouts of a training step. A rollout that is scored, and waits for others of its prompt, does not
    count. Each agent loop worker has one at least, also if those are more."""


@dataclass(frozen=True, slots=True)
class ModeOptions:
    """The options of a run's trainer mode."""

    name: str
    """``trainer.v1.trainer_mode``."""
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    """How the trainer waits for rollouts and rewards."""
    pipeline: PipelineOptions | None = None
    """The options of the mode `reward_pipeline`; ``None`` in other modes."""
    queue: RewardQueueOptions | None = None
    """The options of the queue between generation and judging; ``None`` in other modes, and where the user has an agent
    loop manager."""


@dataclass(frozen=True, slots=True)
class ManagerName:
    """The name of a reward manager: ``reward.reward_manager``."""

    name: str
    """A registered name or an import path; with ``source=importlib``, the name of the class in `module`."""
    source: str
    """``register`` or ``importlib``."""
    module: str | None
    """With ``source=importlib``: a file, or ``pkg://module``."""

    @property
    def is_import_path(self) -> bool:
        """Whether the user names a class by its location."""
        return self.source != "register" or ":" in self.name

    def load(self) -> Any:
        """Return the class, or ``None`` if the name is not registered here: it may be the name of a manager of verl.

        Raises:
            ConfigError: the class cannot be loaded, or is not a manager.
        """
        if self.source == "importlib":
            return get_manager(f"{self.module or ''}:{self.name}")
        return get_manager(self.name) if ":" in self.name or is_known(self.name) else None


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The location of a reward function: ``reward.custom_reward_function``."""

    path: str
    name: str | None
    kwargs: Mapping[str, Any] | None
    """The option ``reward_kwargs``."""

    def load(self) -> Any:
        """Return the function, or the class.

        Raises:
            FunctionLoadError: the function cannot be loaded.
        """
        return load_function(self.path, self.name)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """All settings of a run that concern rewards, read once from verl's configuration, and checked."""

    config: DictConfig
    """verl's whole configuration, which managers receive. Read rewards' options from the other fields."""
    options: RewardLoopConfig
    """The group ``reward_loop``, combined with verl's options of the manager."""
    manager: ManagerName
    function: FunctionName | None
    """The user's function; without one, verl's functions by data source, or the reward model."""
    num_workers: int
    """The number of reward workers."""
    model: RewardModelConfig | None
    """The servers of the reward model, if there is one."""
    mode: ModeOptions
    """The trainer mode."""

    @property
    def scores_by_model(self) -> bool:
        """Whether the reward is the reward model's logit: the user has set neither a function nor a manager."""
        return self.model is not None and self.function is None and not self.manager.is_import_path

    def __reduce__(self) -> tuple[Any, ...]:
        # Compressed: Ray passes an argument of at most 100 KB by value. It keeps a larger one in its object store, and
        # an actor cannot restart once that is lost. verl's configuration takes 110 KB, and 17 KB compressed.
        values = tuple(getattr(self, field.name) for field in fields(self))
        return _unpacked, (zlib.compress(pickle.dumps(values)),)


def _unpacked(packed: bytes) -> RewardSettings:
    return RewardSettings(*pickle.loads(zlib.decompress(packed)))


CONFIG_DIR = Path(__file__).parent / "config"
"""The directory of the reward loop's Hydra configuration."""

MOVED = {
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
"""Old key -> its successor. ``reward_model.rollout.*`` moves to ``reward.reward_model.rollout.*``, key by key. verl's
own ``migrate_legacy_reward_impl`` would lose the name of a manager's class and the defaults beside a given key."""


def added_options() -> DictConfig:
    """Return the options that reward_loop adds to verl's configuration, with their defaults."""
    return OmegaConf.load(CONFIG_DIR / "reward_loop_options.yaml")


def resolve(config: DictConfig) -> RewardSettings:
    """Fill in the options of reward_loop, move old keys to their successors, check, and return the settings of rewards.

    Call it once, in the process of the command. Other processes get the configuration from verl, and call `read`.

    Args:
        config: the composed configuration; changed in place.

    Raises:
        ConfigError: an option is malformed, or contradicts another; the message names it.
    """
    with open_dict(config):
        _fill_in(config)
        rollout = config.reward_model.get("rollout") or {}
        moved = {f"reward_model.rollout.{key}": f"reward.reward_model.rollout.{key}" for key in rollout}
        for old, new in (MOVED | moved).items():
            _move(config, old, new)
        if config.reward_model.reward_loop_module_path is not None and config.reward_model.reward_loop_source is None:
            config.reward.reward_manager.source = "importlib"
        _name_manager(config)
        if (wanted := config.pop("mini_batch_pipeline", None)) is not None:
            _choose_pipeline(config, wanted)
        if config.reward_loop.log_dir is not None:
            # Reward workers may have another working directory.
            config.reward_loop.log_dir = os.path.abspath(config.reward_loop.log_dir)
    return read(config)


def _fill_in(config: DictConfig) -> None:
    """Add the options of reward_loop that the files of the configuration do not have, and turn it on."""
    for group, added in added_options().items():
        given = config.get(group) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{group}={given}: it is a group of options, such as {group}.{next(iter(added))}")
        config[group] = OmegaConf.merge(added, given)
    if config.reward_model.use_reward_loop is None:
        config.reward_model.use_reward_loop = True
    for name in ("check", "untested_verl"):  # of the command alone
        config.reward_loop.pop(name)


def _move(config: DictConfig, old: str, new: str) -> None:
    value = OmegaConf.select(config, old)
    if value is None:
        return
    current, default = (OmegaConf.select(of, new, throw_on_missing=False) for of in (config, verls_defaults()))
    if current not in (default, None, value):
        raise ConfigError(f"{old}={value} contradicts {new}={current}: give one of them")
    OmegaConf.update(config, new, value, force_add=True)


_RATE_LIMITS = {
    "max_concurrent": "max_concurrent",
    "max_rpm": "requests_per_minute",
    "max_tpm": "tokens_per_minute",
    "estimated_tokens_per_request": "estimated_tokens_per_request",
}
"""verl's options ``reward.*`` of its manager ``rate_limited`` -> those of a limit."""


def _name_manager(config: DictConfig) -> None:
    """Replace a name of verl's for `naive` with other options by these options, and by ``naive``.

    The limits of verl's ``rate_limited`` become ``reward_loop.limits.default``, which all workers share. In verl they
    apply to each worker.
    """
    named, options = config.reward.reward_manager, config.reward_loop
    if named.source != "register" or named.name not in OPTIONS:
        return
    if named.name == "rate_limited":
        options.timeout = config.reward.get("timeout") or options.timeout
        given = {name: config.reward[name] for name in _RATE_LIMITS if config.reward.get(name) is not None}
        if "default" not in options.limits:
            defaults = {"max_concurrent": 1, "estimated_tokens_per_request": 2000}  # verl's
            options.limits.default = defaults | {_RATE_LIMITS[name]: value for name, value in given.items()}
        elif given:
            raise ConfigError(f"reward.{min(given)} contradicts reward_loop.limits.default: give one of them")
    else:
        options.isolation = "process"
    named.name = "naive"


def _choose_pipeline(config: DictConfig, wanted: Any) -> None:
    """Translate the top-level option ``mini_batch_pipeline`` of verl's recipe into the mode ``reward_pipeline``."""
    mode = config.trainer.v1.trainer_mode
    if wanted is not False:
        if mode not in ("sync", PIPELINE_MODE):
            raise ConfigError(f"mini_batch_pipeline={wanted} contradicts trainer.v1.trainer_mode={mode}")
        config.trainer.v1.trainer_mode = PIPELINE_MODE
    config.trainer.v1[PIPELINE_MODE].mini_batch_pipeline = wanted


def read(config: DictConfig) -> RewardSettings:
    """Return the settings of rewards from a configuration after `resolve`.

    Raises:
        ConfigError: an option is malformed, or contradicts another; the message names it.
    """
    _check(config)
    reward, custom = config.reward, config.reward.custom_reward_function
    function = None
    if custom.path:
        # `judge:rubric` contains the name; verl's default name has no effect then.
        name = None if custom.name == "compute_score" and ":" in custom.path.removeprefix("pkg://") else custom.name
        kwargs = custom.get("reward_kwargs")
        function = FunctionName(custom.path, name, None if kwargs is None else OmegaConf.to_container(kwargs))
    manager = ManagerName(reward.reward_manager.name, reward.reward_manager.source, reward.reward_manager.module.path)
    mode = read_mode(config)
    settings = RewardSettings(
        config=config,
        options=options_of(config),
        manager=manager,
        function=function,
        num_workers=reward.num_workers,
        model=read_reward_model(config),
        mode=mode,
    )
    _check_mode(config, mode, settings.model)
    if settings.model is not None and settings.options.models:
        raise ConfigError(
            "reward_loop.models: the run serves its models, so set max_concurrent and timeout in reward_model.server "
            "or reward_model.server.models.NAME"
        )
    if settings.scores_by_model:
        _check_scored_by_model(settings)
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
    return config


def _check(config: DictConfig) -> None:
    if (on := config.reward_model.use_reward_loop) is not True:
        raise ConfigError(
            f"reward_model.use_reward_loop={on}: it must be True, or left out in the mode {PIPELINE_MODE}. To train "
            "without reward_loop, leave out both"
        )
    if config.algorithm.adv_estimator == "gdpo":
        raise ConfigError(
            "algorithm.adv_estimator=gdpo: verl's V1 trainer passes estimators only the sum of a sample's rewards, and "
            "GDPO cannot normalise each of them. Use grpo, and combine the rewards in the function"
        )
    if config.reward.num_workers < 1:
        raise ConfigError(f"reward.num_workers={config.reward.num_workers}: it must be at least 1")
    if not config.trainer.get("use_v1", True):
        raise ConfigError("trainer.use_v1=False: reward_loop works only with verl's V1 trainer")


def _check_scored_by_model(settings: RewardSettings) -> None:
    if settings.model is not None and not settings.model.model_path:
        raise ConfigError(
            "reward_model.rollout.name=external without custom_reward_function.path: the reward is the output of the "
            "model, whose tokenizer and name are needed: set reward.reward_model.model_path; or the path of a function"
        )
    if settings.manager.name != "naive":
        raise ConfigError(
            f"reward_model.reward_manager={settings.manager.name} with reward_model.enable=True needs a function: set "
            "custom_reward_function.path. Without a function, the reward is the output of the reward model"
        )


def read_mode(config: DictConfig) -> ModeOptions:
    """Return the options of the trainer mode.

    Raises:
        ConfigError: an option is malformed; the message names it.
    """
    name = config.trainer.v1.trainer_mode
    pipeline = queue = None
    if name == PIPELINE_MODE:
        pipeline = parse(PipelineOptions, config.trainer.v1.get(PIPELINE_MODE), f"trainer.v1.{PIPELINE_MODE}")
    if name == "separate_async" and config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class") is None:
        queue = parse(RewardQueueOptions, OmegaConf.select(config, REWARD_QUEUE), REWARD_QUEUE)
    # The group also has verl's own options.
    given = {key: value for key, value in config.trainer.v1.sampler.items() if key in SamplerOptions.model_fields}
    sampler = parse(SamplerOptions, given, "trainer.v1.sampler")
    return ModeOptions(name, sampler, pipeline, queue)


def mini_batch_groups(config: DictConfig, *, critic: bool) -> int:
    """Return the number of groups in a mini-batch: the least common multiple of the actor's and the critic's sizes."""
    sizes = [config.actor_rollout_ref.actor.ppo_mini_batch_size]
    if critic:
        sizes.append(config.critic.ppo_mini_batch_size)
    return math.lcm(*sizes)


def by_mini_batch(config: DictConfig, options: PipelineOptions) -> bool:
    """Return whether a mini-batch is trained on when its rewards have arrived, before the others have theirs."""
    estimator = config.algorithm.adv_estimator
    if options.mini_batch_pipeline and estimator not in MINI_BATCH_ESTIMATORS:
        logger.warning(
            "trainer.v1.reward_pipeline.mini_batch_pipeline has no effect with algorithm.adv_estimator=%s, which uses "
            "the whole batch: an update waits for all rewards. Estimators that work by mini-batch: %s",
            estimator,
            ", ".join(sorted(MINI_BATCH_ESTIMATORS)),
        )
        return False
    return options.mini_batch_pipeline


def queue_shares(config: DictConfig, options: RewardQueueOptions) -> tuple[int, int]:
    """Return each agent loop worker's share of the queue: its capacity, and how many rollouts are judged at once."""
    rollout = config.actor_rollout_ref.rollout
    workers, batch_size = rollout.agent.num_workers, config.data.train_batch_size
    # Rounded up, as `chunk` does, by which prompts are divided among the workers.
    of_a_step = math.ceil(batch_size / workers) * rollout.n
    of_warmup = math.ceil(batch_size * config.trainer.v1.separate_async.num_warmup_batches / workers) * rollout.n
    # The user's numbers are rounded down, so that all workers together stay within them, if each has work.
    return (
        of_a_step + of_warmup if options.capacity is None else max(rollout.n, options.capacity // workers),
        of_a_step if options.in_flight is None else max(1, options.in_flight // workers),
    )


def _check_mode(config: DictConfig, mode: ModeOptions, model: RewardModelConfig | None) -> None:
    """Reject what does not work in a mode, or needs rewards or GPUs while a model on the trainer's GPUs has neither."""
    fixes = {"skip.rollout_tq.enable": "set it to False", "trainer.v1.sampler.custom_sampler.path": "leave it out"}
    for option, fix in fixes.items():
        if mode.pipeline is not None and (value := OmegaConf.select(config, option)):
            raise ConfigError(f"{option}={value} does not work with trainer.v1.trainer_mode={PIPELINE_MODE}: {fix}")
    if model is None or model.placement != "colocated":
        return
    filters, off_policy = "algorithm.filter_groups.enable", f"trainer.v1.{mode.name}.one_step_off_policy"
    for option, given, why in (
        ("trainer.v1.trainer_mode", mode.name == "separate_async", "the rollout never sleeps"),
        (off_policy, OmegaConf.select(config, off_policy), "the next rollout would run while the model is awake"),
        (filters, OmegaConf.select(config, filters), "groups are filtered while the rollout is awake"),
    ):
        if given:
            raise ConfigError(
                f"{option}={OmegaConf.select(config, option)} does not work with a reward model on the trainer's GPUs: "
                f"{why}. Change it, or {OWN_GPUS}"
            )
