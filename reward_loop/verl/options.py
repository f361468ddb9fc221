"""The bridge between the options that verl users write and those that take effect.

verl 0.9.1 accepts ``reward_model.*``, ``custom_reward_function.*`` and ``sandbox_fusion.*`` and ignores them. Here they
take effect: each moves to its successor under ``reward.*``. One that contradicts its successor, or that nobody knows,
is an error.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import Field

from reward_loop._text import did_you_mean, listing
from reward_loop.config import Config, RewardLoopConfig, RewardModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.rate_limited import RateLimitedConfig
from reward_loop.managers.registry import get as get_manager
from reward_loop.managers.registry import names as manager_names
from reward_loop.router.servers.models import ENGINES

__all__ = [
    "CONFIG_DIR",
    "PIPELINE_MODE",
    "REWARD_QUEUE",
    "PipelineOptions",
    "RewardQueueOptions",
    "has_reward_queue",
    "pipeline_options",
    "queue_shares",
    "reward_loop_options",
    "reward_model_options",
    "reward_queue_options",
    "scores_by_model",
    "settle",
    "stall_timeout",
    "verl_config_dir",
    "without_reward",
]

CONFIG_DIR = Path(__file__).parent / "config"

PIPELINE_MODE = "reward_pipeline"
"""The name of our trainer mode, as in ``trainer.v1.trainer_mode=reward_pipeline``."""

REWARD_QUEUE = "trainer.v1.separate_async.reward_queue"
"""The options of the queue between generation and judging."""

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
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "custom_reward_function.reward_kwargs": "reward.custom_reward_function.reward_kwargs",
    "sandbox_fusion.url": "reward.sandbox_fusion.url",
    "sandbox_fusion.max_concurrent": "reward.sandbox_fusion.max_concurrent",
    "sandbox_fusion.memory_limit_mb": "reward.sandbox_fusion.memory_limit_mb",
}
"""Old key -> its successor. ``reward_model.rollout.*`` moves to ``reward.reward_model.rollout.*``, key by key."""

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
}
"""Groups whose keys are the user's own."""

_SERVER_OPTIONS = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
}
"""verl's ``rollout.*`` -> ours. They take effect as they are, verl's defaults included."""

_ENGINE_ARGS = {
    "vllm": {
        "enforce_eager": "enforce_eager",
        "load_format": "load_format",
        "max_num_batched_tokens": "max_num_batched_tokens",
        "max_num_seqs": "max_num_seqs",
        "quantization": "quantization",
        "seed": "seed",
    },
    "sglang": {
        "enforce_eager": "disable_cuda_graph",
        "load_format": "load_format",
        "max_num_seqs": "max_running_requests",
        "quantization": "quantization",
        "seed": "random_seed",
    },
}
"""verl's ``rollout.*`` -> an option of the engine's command line."""

_HOLDS_ANYWAY = {"rollout.dtype": "float32", "rollout.tensor_model_parallel_size": 1}
"""What may be said of the embedded engine."""

_UNUSED = {
    "reward_model.model.external_lib": "import what the model needs in the module of your reward function",
    "reward_model.model.trust_remote_code": "reward models with code of their own are not supported",
}
"""Old keys that verl has no successor for, and what to do instead."""


def verl_config_dir() -> Path:
    """Where the installed verl keeps its Hydra configuration. Found without importing verl.

    Raises:
        ConfigError: verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ConfigError("verl is not installed: pip install 'reward-loop[verl]'")
    return Path(spec.origin).parent / "trainer" / "config"


def settle(config: DictConfig, given: Collection[str] = ()) -> None:
    """Moves the keys that users write to where they take effect, in place, and checks them.

    Args:
        config: the composed configuration.
        given: the overrides of the command line. They go before what a file says, whichever name a file uses.

    Raises:
        ConfigError: a key is unknown, contradicts another, or cannot take effect; the message names the keys.
    """
    defaults = _defaults()
    unknown = [
        message
        for group in ("reward", "reward_model", "custom_reward_function", "sandbox_fusion", "reward_loop")
        for message in _unknown(group, config.get(group) or {}, defaults[group])
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))
    for key, advice in _UNUSED.items():
        if OmegaConf.select(config, key) is not None:
            raise ConfigError(f"{key} has no effect: {advice}")
    overridden = {override.lstrip("+~").partition("=")[0] for override in given}
    moved = dict(_MOVED)
    for key in config.reward_model.get("rollout") or {}:
        moved[f"reward_model.rollout.{key}"] = f"reward.reward_model.rollout.{key}"
    with open_dict(config):
        for old, new in moved.items():
            _move(config, old, new, defaults, overridden)
        if config.reward_model.reward_loop_module_path is not None and config.reward_model.reward_loop_source is None:
            config.reward.reward_manager.source = "importlib"
        if config.get("mini_batch_pipeline") is not None:
            # As the users of verl's recipe write it.
            config.trainer.v1.trainer_mode = PIPELINE_MODE
            config.trainer.v1[PIPELINE_MODE].mini_batch_pipeline = config.pop("mini_batch_pipeline")
    _check(config, defaults)


class PipelineOptions(Config):
    """``trainer.v1.reward_pipeline``."""

    mini_batch_pipeline: bool = True
    """Update on every mini-batch of groups as soon as its rewards are in."""

    one_step_off_policy: bool = True
    """Generate the next step's rollouts before this step's update."""

    stall_timeout_s: float | None = Field(default=3600.0, gt=0)
    """The run stops when the trainer waits and, for so many seconds, no prompt's generation has ended and no reward has
    begun or ended; ``None`` waits for ever."""


def pipeline_options(config: DictConfig) -> PipelineOptions:
    """The ``trainer.v1.reward_pipeline`` group."""
    return parse(PipelineOptions, config.trainer.v1.get(PIPELINE_MODE), f"trainer.v1.{PIPELINE_MODE}")


class RewardQueueOptions(Config):
    """``trainer.v1.separate_async.reward_queue``."""

    enabled: bool = True
    """Whether there is a queue between generation and judging in the mode `separate_async`."""

    capacity: int | None = Field(default=None, ge=1)
    """How many rollouts may be generated or wait for a judge, all together: a prompt's rollouts are not begun before
    there is room for them. By default as many as verl has under way: a training step's, and `num_warmup_batches`."""

    in_flight: int | None = Field(default=None, ge=1)
    """How many rollouts are judged at a time, the oldest first; the others wait in the queue. By default those of a
    training step; with a reward manager that waits for all rollouts of a prompt, there is no bound."""

    stall_timeout_s: float | None = Field(default=3600.0, gt=0)
    """The run stops when training or validation waits and, for so many seconds, no prompt has begun or ended and no
    rollout got its reward; `None` waits for ever."""


def reward_queue_options(config: DictConfig) -> RewardQueueOptions:
    """The ``trainer.v1.separate_async.reward_queue`` group."""
    return parse(RewardQueueOptions, OmegaConf.select(config, REWARD_QUEUE), REWARD_QUEUE)


def has_reward_queue(config: DictConfig) -> bool:
    """Whether rollouts go through the queue to their judges."""
    mode = config.trainer.v1.trainer_mode
    return mode == "separate_async" and config.reward_model.use_reward_loop and reward_queue_options(config).enabled


def stall_timeout(config: DictConfig) -> tuple[float | None, str]:
    """Seconds without news that verl's replay buffer waits for, and the name of the option."""
    if config.trainer.v1.trainer_mode == PIPELINE_MODE:
        return pipeline_options(config).stall_timeout_s, f"trainer.v1.{PIPELINE_MODE}.stall_timeout_s"
    timeout = reward_queue_options(config).stall_timeout_s if has_reward_queue(config) else None
    return timeout, f"{REWARD_QUEUE}.stall_timeout_s"


def queue_shares(config: DictConfig) -> tuple[int, int]:
    """Each agent loop worker's share of the queue: how many rollouts it may hold, and have judged at a time."""
    options, rollout = reward_queue_options(config), config.actor_rollout_ref.rollout
    workers, batch_size = rollout.agent.num_workers, config.data.train_batch_size
    of_a_step = math.ceil(batch_size / workers) * rollout.n
    of_warmup = math.ceil(batch_size * config.trainer.v1.separate_async.num_warmup_batches / workers) * rollout.n
    return (
        of_a_step + of_warmup if options.capacity is None else options.capacity // workers,
        of_a_step if options.in_flight is None else options.in_flight // workers,
    )


def _check_reward_queue(config: DictConfig) -> None:
    """Refuses a queue that could not work.

    Raises:
        ConfigError: an option is malformed, or contradicts another; the message names it and what to set instead.
    """
    options, rollout = reward_queue_options(config), config.actor_rollout_ref.rollout
    workers = rollout.agent.num_workers
    if not has_reward_queue(config):
        return
    if options.capacity is not None and options.capacity < workers * rollout.n:
        raise ConfigError(
            f"{REWARD_QUEUE}.capacity={options.capacity}: at least {workers * rollout.n}, a prompt's rollouts "
            f"(actor_rollout_ref.rollout.n={rollout.n}) for each of the {workers} agent loop workers that share it "
            "(actor_rollout_ref.rollout.agent.num_workers)"
        )
    if options.in_flight is not None and options.in_flight < workers:
        raise ConfigError(
            f"{REWARD_QUEUE}.in_flight={options.in_flight}: at least {workers}, one for each of the agent loop workers "
            "that share it (actor_rollout_ref.rollout.agent.num_workers)"
        )
    manager = rollout.agent.get("agent_loop_manager_class")
    if manager is not None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager} stands where the reward queue would "
            f"be: leave it out, or set {REWARD_QUEUE}.enabled=False"
        )


def reward_loop_options(config: DictConfig) -> RewardLoopConfig:
    """The ``reward_loop`` group, and what the configured manager makes of options that verl has for it."""
    name = config.reward.reward_manager.name
    cls = get_manager(name) if name in manager_names() else RewardLoopManagerBase
    return cls.read_options(config)


def reward_model_options(config: DictConfig) -> RewardModelConfig | None:
    """How the reward model is served, or ``None`` if there is none.

    Raises:
        ConfigError: an option is malformed, contradicts another, or asks for what there is not.
    """
    model = config.reward.reward_model
    if not model.enable:
        return None
    options = {"model_path": model.model_path, "engine": model.rollout.name}
    if model.rollout.name in _ENGINE_ARGS:
        options |= _engine_options(model.rollout)
    options |= config.reward_model.server
    if model.enable_resource_pool:
        options |= _pool(model, options)
    served = parse(RewardModelConfig, options, "reward_model.server")
    if not model.enable_resource_pool and "placement" not in config.reward_model.server and _takes_gpus(served):
        served = served.model_copy(update={"placement": "colocated"})
    return _colocated(config, served) if served.placement == "colocated" else served


def _engine_options(rollout: DictConfig) -> dict[str, Any]:
    """verl's options of an inference engine, as ours. Those left at verl's defaults are the engine's business."""
    default = _defaults().reward.reward_model.rollout
    arguments = _ENGINE_ARGS[rollout.name]
    given = {ours: rollout[name] for name, ours in arguments.items() if rollout[name] != default[name]}
    for name, kwargs in (rollout.engine_kwargs or {}).items():
        if name != rollout.name:
            raise ConfigError(
                f"reward_model.rollout.engine_kwargs.{name}: write reward_model.rollout.engine_kwargs.{rollout.name}.*"
            )
        given |= kwargs
    return {ours: rollout[name] for name, ours in _SERVER_OPTIONS.items()} | {"engine_args": given}


def _pool(model: DictConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """As many replicas as the pool of GPUs has room for, as in verl."""
    for name in ("replicas", "placement"):
        if name in options:
            raise ConfigError(
                f"reward_model.server.{name} contradicts reward_model.enable_resource_pool=True, which decides it"
            )
    size = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    replicas = _room(model, size, "reward_model.enable_resource_pool=True")
    return {"replicas": replicas, "placement": "ray"}


def _colocated(config: DictConfig, served: RewardModelConfig) -> RewardModelConfig:
    """On the trainer's GPUs: as many replicas as there is room for, unless their number is given, and all can sleep."""
    if served.engine == "external":
        raise ConfigError(
            "reward_model.server.placement=colocated: a server that someone else runs (reward_model.rollout.name="
            "external) is not put to sleep. Leave out placement"
        )
    rooms = {
        name: _room(config.trainer, max(1, ENGINES[model.engine].gpus(model)), "a reward model on the trainer's GPUs")
        for name, model in {"": served, **served.models}.items()
        if model.engine in ENGINES
    }
    for name, room in rooms.items():
        option, model = (f"models.{name}.replicas", served.models[name]) if name else ("replicas", served)
        if model.replicas > room:
            raise ConfigError(f"reward_model.server.{option}={model.replicas}: the trainer's GPUs have room for {room}")
    can_sleep = {"enable_sleep_mode": True}
    models = {name: model.model_copy(update=can_sleep) for name, model in served.models.items()}
    replicas = served.replicas if "replicas" in config.reward_model.server else rooms[""]
    return served.model_copy(update={**can_sleep, "models": models, "replicas": replicas})


def _room(pool: DictConfig, size: int, which: str) -> int:
    replicas = pool.n_gpus_per_node // size * pool.nnodes
    if replicas < 1:
        raise ConfigError(
            f"{which}: nnodes={pool.nnodes} with n_gpus_per_node={pool.n_gpus_per_node} have no room for a server of "
            f"{size} GPU(s) (tensor_model_parallel_size times data_parallel_size); a server's GPUs are on one node"
        )
    return replicas


def _takes_gpus(config: RewardModelConfig) -> bool:
    models = [config, *config.models.values()]
    return any(model.engine in ENGINES and ENGINES[model.engine].gpus(model) for model in models)


def scores_by_model(config: DictConfig) -> bool:
    """Whether the reward is the logit of the reward model, since there is no function and no manager of the user's."""
    manager = config.reward.reward_manager
    own = manager.source != "register" or ":" in manager.name or manager.name == "composite"
    return config.reward.reward_model.enable and not config.reward.custom_reward_function.path and not own


def without_reward(config: DictConfig) -> DictConfig:
    """A copy for verl's trainer with verl's own reward workers and servers switched off: ours do their work."""
    config = OmegaConf.create(OmegaConf.to_container(config))
    with open_dict(config):
        config.reward.num_workers = 0
        config.reward.reward_model.enable = False
        config.reward.reward_model.enable_resource_pool = False
        config.reward.custom_reward_function.path = None
        config.reward.reward_manager.source = "register"
        config.reward.reward_manager.name = "naive"
        config.reward_loop.job = None  # a secret, which verl's loggers would write down
    return config


def _check_pipeline(config: DictConfig) -> None:
    """Refuses what this mode cannot do.

    Raises:
        ConfigError: an option contradicts the mode; the message names it and what to set instead.
    """
    pipeline_options(config)
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    refused = {
        "reward_model.use_reward_loop=False": (not config.reward_model.use_reward_loop, "set it to True"),
        "skip.rollout_tq.enable=True": (OmegaConf.select(config, "skip.rollout_tq.enable"), "set it to False"),
        f"trainer.v1.sampler.custom_sampler.path={sampler.get('path')}": (sampler.get("path"), "leave it out"),
    }
    for what, (given, instead) in refused.items():
        if given:
            raise ConfigError(f"trainer.v1.trainer_mode={PIPELINE_MODE} does not work with {what}: {instead}")


def _check_colocated(config: DictConfig, served: RewardModelConfig) -> None:
    """Refuses what needs rewards while the model sleeps, or the model's GPUs while it is awake.

    Raises:
        ConfigError: an option contradicts it; the message names it and what to set instead.
    """
    mode = config.trainer.v1.trainer_mode
    off_policy = f"trainer.v1.{PIPELINE_MODE}.one_step_off_policy"
    filters = OmegaConf.select(config, "algorithm.filter_groups.enable")
    keeps = _takes_gpus(served) and not config.actor_rollout_ref.rollout.free_cache_engine
    own_gpus = "give the model GPUs of its own: reward_model.enable_resource_pool=True"
    refused = {
        f"trainer.v1.trainer_mode={mode}": (mode == "separate_async", f"the rollout never sleeps; {own_gpus}"),
        f"{off_policy}=True": (
            mode == PIPELINE_MODE and pipeline_options(config).one_step_off_policy,
            f"the next rollout cannot run while the model judges on its GPUs. Set it to False, or {own_gpus}",
        ),
        "algorithm.filter_groups.enable=True": (
            filters,
            f"groups are filtered while the rollout is awake. Set it to False, or {own_gpus}",
        ),
        "reward_model.launch_reward_fn_async=True": (
            config.reward_model.launch_reward_fn_async,
            "log-probabilities need the memory that the model judges in. Leave it out",
        ),
        "actor_rollout_ref.rollout.free_cache_engine=False": (
            keeps,
            "the rollout would keep its GPU memory when it sleeps. Set it to True",
        ),
    }
    for what, (given, why) in refused.items():
        if given:
            raise ConfigError(f"{what} does not work with a reward model on the trainer's GPUs: {why}")


def _without_effect(model: DictConfig, default: DictConfig, prefix: str = "", engine: str = "") -> Iterator[str]:
    """The options of verl's reward model servers that were set, and that ours do not have."""
    for key in model:
        path = f"{prefix}{key}"
        if path in ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes", "model_path", "rollout.name"):
            continue
        if prefix and engine in _ENGINE_ARGS and (key in _SERVER_OPTIONS or key in _ENGINE_ARGS[engine]):
            continue
        if path == "rollout.engine_kwargs" and engine in _ENGINE_ARGS:
            continue
        if engine == "transformers" and model[key] == _HOLDS_ANYWAY.get(path):
            continue
        if isinstance(model[key], DictConfig) and key in default:
            yield from _without_effect(model[key], default[key], f"{path}.", engine)
        elif model[key] != default.get(key):
            yield path


def _defaults() -> DictConfig:
    directory = verl_config_dir()
    return OmegaConf.merge(
        OmegaConf.load(directory / "legacy_reward_impl.yaml"),
        {"reward": OmegaConf.load(directory / "reward" / "reward.yaml")},
        {
            "reward_model": {"reward_kwargs": None},
            "custom_reward_function": {"reward_kwargs": None},
            "reward": {
                "reward_kwargs": None,
                "custom_reward_function": {"reward_kwargs": None},
                **dict.fromkeys(RateLimitedConfig.model_fields),
            },
        },
        OmegaConf.load(CONFIG_DIR / "reward_loop_trainer.yaml"),
        {"reward_model": {"server": dict.fromkeys(RewardModelConfig.model_fields)}},
    )


def _unknown(where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    if where in _OPEN:
        return
    names = list(known)  # `in` says no to mandatory values ("???")
    for key in given:
        path = f"{where}.{key}"
        if key not in names:
            yield f"{path}: unknown option{did_you_mean(str(key), names) or '.'} Known here: {listing(names)}"
            continue
        value = None if OmegaConf.is_missing(given, key) else given[key]
        if isinstance(value, Mapping) and path not in _OPEN:
            inner = None if OmegaConf.is_missing(known, key) else known[key]
            yield from _unknown(path, value, inner if isinstance(inner, Mapping) else {})


def _move(config: DictConfig, old: str, new: str, defaults: DictConfig, overridden: Collection[str]) -> None:
    value = OmegaConf.select(config, old)
    if value is None:
        return
    current, default = _select(config, new), _select(defaults, new)
    # Where only one of the two is on the command line, that one counts.
    if new in overridden and old not in overridden:
        return
    decided = old in overridden and new not in overridden
    if not decided and current not in (default, value):
        raise ConfigError(f"{old}={value} contradicts {new}={current}: give one of them")
    OmegaConf.update(config, new, value, force_add=True)


def _select(config: DictConfig, key: str) -> Any:
    # Mandatory values that nobody gave ("???") count as not given.
    return OmegaConf.select(config, key, throw_on_missing=False)


def _check(config: DictConfig, defaults: DictConfig) -> None:
    if not isinstance(config.reward_model.use_reward_loop, bool):
        raise ConfigError(f"reward_model.use_reward_loop={config.reward_model.use_reward_loop}: True or False")
    if config.reward_model.use_reward_loop and config.reward_model.launch_reward_fn_async is False:
        raise ConfigError(
            "reward_model.launch_reward_fn_async=False contradicts reward_model.use_reward_loop=True: the reward loop "
            "scores every rollout as soon as it is finished. Leave the former out, or set use_reward_loop=False"
        )
    model = config.reward.reward_model
    if model.enable and not model.model_path:
        raise ConfigError("reward_model.enable=True needs a model: set reward_model.model.path")
    options = reward_loop_options(config)
    function = config.reward.custom_reward_function
    composite = config.reward.reward_manager.name == "composite"
    if composite and function.path and all(component.path for component in options.components.values()):
        raise ConfigError(
            f"custom_reward_function.path={function.path} has no effect: each of reward_loop.components has a path of "
            "its own. Leave it out, or leave out the path of the component that it is"
        )
    if options.components and not composite:
        raise ConfigError("reward_loop.components have an effect with reward_model.reward_manager=composite alone")
    if config.reward.reward_manager.name not in ("rate_limited", "limited"):
        for key in RateLimitedConfig.model_fields:
            if config.reward.get(key) is not None:
                raise ConfigError(
                    f"reward.{key} has an effect with reward_model.reward_manager=rate_limited alone; for others, set "
                    "reward_loop.limits and reward_loop.timeout"
                )
    if config.algorithm.adv_estimator == "gdpo":
        _check_gdpo(config.algorithm)
    if scores_by_model(config) and config.reward.reward_manager.name != "naive":
        raise ConfigError(
            f"reward_model.reward_manager={config.reward.reward_manager.name} beside reward_model.enable=True needs a "
            "function: set custom_reward_function.path. Without one, the reward is what the reward model alone says"
        )
    if model.enable and OmegaConf.is_missing(model.rollout, "name"):
        raise ConfigError(
            "reward_model.rollout.name: say what serves the reward model: vllm, sglang, transformers or external"
        )
    engine = _select(config, "reward.reward_model.rollout.name")
    for key in _without_effect(model, defaults.reward.reward_model, engine=engine or ""):
        raise ConfigError(
            f"reward.reward_model.{key} has no effect with reward_model.rollout.name={engine}. The servers' own "
            "options are reward_model.server.*"
        )
    if model.enable_resource_pool and not model.enable:
        raise ConfigError("reward_model.enable_resource_pool=True has no effect without reward_model.enable=True")
    if config.reward.num_workers < 1:
        raise ConfigError(f"reward.num_workers={config.reward.num_workers}: at least one reward worker is needed")
    if not config.trainer.get("use_v1", True):
        raise ConfigError("trainer.use_v1=False: reward_loop works with verl's V1 trainer alone")
    if config.trainer.v1.trainer_mode == PIPELINE_MODE:
        _check_pipeline(config)
    if config.trainer.v1.trainer_mode == "separate_async":
        _check_reward_queue(config)
    served = reward_model_options(config)
    if served is not None and served.placement == "colocated":
        _check_colocated(config, served)


def _check_gdpo(algorithm: DictConfig) -> None:
    keys, weights = algorithm.get("gdpo_reward_keys"), algorithm.get("gdpo_reward_weights")
    if not keys:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo needs the rewards that it normalises: set +algorithm.gdpo_reward_keys=[...] "
            "to keys that the reward function returns"
        )
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights: {len(keys)} are needed, one for each of algorithm.gdpo_reward_keys; "
            f"got {len(weights)}"
        )
