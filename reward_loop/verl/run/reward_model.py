"""Combines verl's options and the reward loop's options for the reward model's servers, and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from reward_loop.config import RewardModelConfig, ServedModelConfig, parse
from reward_loop.errors import ConfigError
from reward_loop.serving.engines import ENGINES, normalised
from reward_loop.serving.models import check_path
from reward_loop.serving.server_spec import VISIBLE_DEVICES
from reward_loop.verl.installed import verls_defaults

_SERVER_OPTIONS = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
}
"""verl's option ``rollout.*`` -> ours. Values are passed on unchanged, including verl's defaults."""

_ENGINE_ARGS = {
    "enable_chunked_prefill": {"vllm": "enable_chunked_prefill"},
    "enable_prefix_caching": {"vllm": "enable_prefix_caching"},
    "enforce_eager": {"vllm": "enforce_eager", "sglang": "disable_cuda_graph"},
    "load_format": {"vllm": "load_format", "sglang": "load_format"},
    "max_num_batched_tokens": {"vllm": "max_num_batched_tokens"},
    "max_num_seqs": {"vllm": "max_num_seqs", "sglang": "max_running_requests"},
    "quantization": {"vllm": "quantization", "sglang": "quantization"},
    "seed": {"vllm": "seed", "sglang": "random_seed"},
}
"""verl's option ``rollout.*`` -> an option of the engine's command line. verl's defaults are also passed on. Others are
``reward_model.server.engine_args``."""

OWN_GPUS = "give the model GPUs of its own: reward_model.enable_resource_pool=True"

_WITH_VERLS_SERVERS = (
    *("models", "served_model_name", "max_concurrent", "timeout"),
    *("placement", "host", "router_port", "log_dir", "policy", "request_timeout_s"),
    *("health_interval_s", "health_timeout_s", "max_failed_checks"),
)
"""The options of ``reward_model.server`` that apply to a reward model on the trainer's GPUs: those of the router and of
requests."""


def read_reward_model(config: DictConfig) -> RewardModelConfig | None:
    """Return the options of the reward model's servers, or ``None`` if there is no reward model.

    Raises:
        ConfigError: an option is malformed or missing, has no effect, contradicts another, or needs more GPUs than
            there are; the message names it and the fix.
    """
    model = config.reward.reward_model
    _check(model)
    if not model.enable:
        return None
    options = {"model_path": model.model_path, "engine": model.rollout.name}
    if config.trainer.device == "cpu":
        options["device"] = "cpu"
    if model.rollout.name in ("vllm", "sglang"):
        options |= _engine_options(config)
    own = config.reward_model.server
    engine_args = options.get("engine_args", {}) | normalised(own.get("engine_args") or {})
    # Ours last: `reward_model.server` takes precedence over verl's options.
    options |= {**own, "engine_args": engine_args, "env": {**options.get("env", {}), **(own.get("env") or {})}}
    if model.enable_resource_pool:
        options |= _pool(model, options)
    served = parse(RewardModelConfig, options, "reward_model.server")
    # As in verl: a model that needs GPUs, and has no pool of its own, is on those of the trainer.
    if not model.enable_resource_pool and "placement" not in own and _gpus(served):
        served = parse(RewardModelConfig, options | {"placement": "colocated"}, "reward_model.server")
    for name, one in served.models.items():
        if one.placement == "colocated":
            raise ConfigError(
                f"reward_model.server.models.{name}: only the first model can be on the trainer's GPUs. Set "
                f"reward_model.server.models.{name}.placement=ray (GPUs of its own) or .engine=external"
            )
    if served.placement == "colocated":
        served = _colocated(config, served)
    if config.trainer.device != "cpu":
        _check_local(served)
    return served


def verls_options(config: DictConfig, name: str | None = None) -> DictConfig:
    """Return verl's options of a reward model on the trainer's GPUs.

    Args:
        config: verl's whole configuration.
        name: the name that requests use; ``None`` for that of the engine.
    """
    reward, trainer = config.reward, config.trainer
    options: Any = OmegaConf.create(OmegaConf.to_container(reward.reward_model, resolve=True))
    # verl reads from these options how the GPUs of the pool, here the trainer's, are distributed over nodes.
    options.nnodes, options.n_gpus_per_node = trainer.nnodes, trainer.n_gpus_per_node
    rollout = options.rollout
    if rollout.full_determinism and reward.custom_reward_function.path is None:
        rollout.max_num_seqs = 1  # as verl does: batches of /classify are not reproducible
    if name is not None:
        arguments = dict((rollout.engine_kwargs or {}).get(rollout.name) or {})
        rollout.engine_kwargs = {rollout.name: {**arguments, "served_model_name": name}}
    return options


def _check_local(served: RewardModelConfig) -> None:
    """Reject servers whose GPUs nobody has chosen: Ray's processes see all GPUs, also those of the trainer."""
    for key, model in {"": served, **served.models}.items():
        if model.placement == "local" and _gpus(model) and VISIBLE_DEVICES not in model.env:
            env = f"reward_model.server.{f'models.{key}.' if key else ''}env.CUDA_VISIBLE_DEVICES"
            raise ConfigError(
                f"reward_model.server.placement=local with reward_model.rollout.name={model.engine}: the servers could "
                "get GPUs of the trainer, since Ray reserves none for them. Leave out placement (GPUs of its own: "
                f"enable_resource_pool=True), or name GPUs: +{env}='\\'6,7\\''"
            )


def _engine_options(config: DictConfig) -> dict[str, Any]:
    """Return verl's options of an inference engine as ours. verl's defaults override the defaults of the engine."""
    rollout = config.reward.reward_model.rollout
    engine, given, env = rollout.name, dict[str, Any](), dict[str, str]()
    for name, arguments in _ENGINE_ARGS.items():
        value, argument = rollout[name], arguments.get(engine)
        if argument is None or value is None:
            continue
        if value is False and engine == "vllm":  # may be on by default
            given[f"no_{argument}"] = True
        else:
            given[argument] = value
    if rollout.full_determinism or config.actor_rollout_ref.rollout.full_determinism:
        if engine == "sglang":
            given["enable_deterministic_inference"] = True
        else:
            env["VLLM_BATCH_INVARIANT"] = "1"
        if config.reward.custom_reward_function.path is None:
            given[_ENGINE_ARGS["max_num_seqs"][engine]] = 1  # as verl does: batches of /classify are not reproducible
    if engine == "vllm":
        given["override_generation_config"] = _generation_config(rollout)
    for name, kwargs in (rollout.engine_kwargs or {}).items():
        if name != engine:
            raise ConfigError(
                f"reward_model.rollout.engine_kwargs.{name}: write reward_model.rollout.engine_kwargs.{engine}.*"
            )
        given |= normalised(kwargs)
    options = {ours: rollout[name] for name, ours in _SERVER_OPTIONS.items()}
    return options | {"engine_args": given, "env": env}


def _generation_config(rollout: DictConfig) -> dict[str, Any]:
    """Return verl's defaults for the sampling of vLLM, which replace those of the model."""
    config = {"temperature": rollout.temperature, "top_k": rollout.top_k, "top_p": rollout.top_p}
    config["repetition_penalty"] = 1.0
    # vLLM also shortens the replies of requests that ask for more tokens, so verl's default is not passed on.
    if rollout.response_length != verls_defaults().reward.reward_model.rollout.response_length:
        config["max_new_tokens"] = rollout.response_length
    return config


def _pool(model: DictConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a separate GPU pool: as many replicas as fit into it, as in verl."""
    for name in ("replicas", "placement"):
        if name in options:
            raise ConfigError(
                f"reward_model.server.{name} contradicts reward_model.enable_resource_pool=True, which decides it"
            )
    # With data-parallel attention, SGLang's data-parallel ranks are on the GPUs of the tensor-parallel ranks.
    shares = options["engine_args"].get("enable_dp_attention") is True
    size = options.get("tensor_parallel_size", 1) * (1 if shares else options.get("data_parallel_size", 1))
    if not model.nnodes:
        raise ConfigError(
            "reward_model.enable_resource_pool=True needs reward_model.nnodes (verl's default is 0) and "
            "reward_model.n_gpus_per_node: GPUs of the reward model, besides those of the trainer. For example, on one "
            "node with 8 GPUs: reward_model.nnodes=1 reward_model.n_gpus_per_node=4 trainer.n_gpus_per_node=4"
        )
    replicas = _room(model, size, "reward_model.enable_resource_pool=True")
    return {"replicas": replicas, "placement": "ray"}


def _colocated(config: DictConfig, served: RewardModelConfig) -> RewardModelConfig:
    """Return the options for verl's own servers on the trainer's GPUs: as many replicas as fit, as in verl.

    Raises:
        ConfigError: an option has no effect on them.
    """
    for option in config.reward_model.server:
        if option not in _WITH_VERLS_SERVERS:
            of = "model.trust_remote_code" if option == "trust_remote_code" else f"server.{option}"
            raise ConfigError(
                f"reward_model.{of} has no effect with a reward model on the trainer's GPUs: verl starts its servers, "
                f"with the options reward_model.rollout.*. Leave it out, or {OWN_GPUS}"
            )
    replicas = _room(config.trainer, max(1, _gpus(served)), "the reward model on the trainer's GPUs")
    return served.model_copy(update={"replicas": replicas})


def _room(pool: DictConfig, size: int, which: str) -> int:
    replicas = pool.n_gpus_per_node // size * pool.nnodes
    if replicas < 1:
        raise ConfigError(
            f"{which}: nnodes={pool.nnodes} with n_gpus_per_node={pool.n_gpus_per_node} have no room for a server of "
            f"{size} GPU(s) (tensor_model_parallel_size times data_parallel_size) on one node. A server on several "
            "nodes is not supported: reduce these sizes, or run your own servers with reward_model.rollout.name="
            "external"
        )
    return replicas


def _gpus(model: ServedModelConfig) -> int:
    return ENGINES[model.engine].gpus(model) if model.engine in ENGINES else 0


def _check(model: DictConfig) -> None:
    """Reject options of verl's group ``reward.reward_model`` that are missing or contradict each other."""
    engine = OmegaConf.select(model, "rollout.name", throw_on_missing=False)
    if model.enable and not model.model_path and engine != "external":
        raise ConfigError("reward.reward_model.enable=True needs a model: set reward.reward_model.model_path")
    if model.enable and model.model_path:
        check_path(str(model.model_path), "reward.reward_model.model_path")
    if model.enable and engine is None:
        raise ConfigError(
            "reward.reward_model.rollout.name is missing: set the engine of the reward model's servers (vllm, sglang, "
            "transformers or external)"
        )
