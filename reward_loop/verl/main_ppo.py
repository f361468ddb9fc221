"""``python -m reward_loop.verl.main_ppo <verl options>``: verl's PPO trainer, with rewards from the reward loop.

The options are those of verl and of ``reward_loop/verl/config``. ``--config-name cpu`` runs without a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from reward_loop._util.text import did_you_mean, listing
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import scoring_function
from reward_loop.managers.registry import get as get_manager
from reward_loop.managers.registry import names as manager_names
from reward_loop.scoring import ScoringFunction
from reward_loop.scoring.load import load_function
from reward_loop.serving.checkpoint import architectures, model_kind
from reward_loop.serving.models import served_models
from reward_loop.verl import compat
from reward_loop.verl.cpu.preload import preloaded
from reward_loop.verl.cpu.running_ray import joins_running_ray, prepare_to_join
from reward_loop.verl.defaults import CONFIG_DIR, verl_config_dir
from reward_loop.verl.ray_start import with_ray
from reward_loop.verl.resolve import resolve
from reward_loop.verl.settings import RewardSettings

__all__ = ["main", "run"]

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "reward_loop.verl.cpu.plugin",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default timeout is 30 s, which can be too short on a busy laptop.
    "RAY_agent_register_timeout_ms": "300000",
    # By default, Ray runs workers at nice 15, so all other processes of the machine have priority.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
"""Environment variables for a run on a CPU. Values that the user has set take precedence."""

OBJECT_STORE_BYTES = 256 * 2**20
"""The size of Ray's object store in a run on a CPU."""


def run(config: DictConfig, task_runner: Any = None) -> None:
    """Checks the configuration, and runs the training.

    Args:
        config: the composed Hydra configuration; changed in place.
        task_runner: a Ray actor class that replaces `TaskRunner`, for recipes with a task runner of their own.

    Raises:
        RewardLoopError: an option is wrong, the reward function cannot be loaded, the reward model does not start, or
            the rewards fail in a way that must stop the run.
    """
    if config.trainer.device == "cpu":
        # Do this before loading the user's function: its file may import verl, which chooses its platform at import.
        for name, value in _cpu_environment(config).items():
            os.environ.setdefault(name, value)
    settings = resolve(config, given=HydraConfig.get().overrides.task if HydraConfig.initialized() else ())
    check_function(settings)
    cpus_of_servers = 0
    if settings.model is not None:
        _check_model(settings, settings.model)
        if settings.model.placement == "ray":
            cpus_of_servers = sum(model.replicas * model.threads for model in served_models(settings.model))
    if config.trainer.device == "cpu":
        _prepare_cpu(config, cpus_of_servers)
        with _preloaded(config):
            _train(config, settings, task_runner)
    else:
        _train(config, settings, task_runner)


def _train(config: DictConfig, settings: RewardSettings, task_runner: Any) -> None:
    # verl chooses its platform at import, so import it only here.
    compat.check(compat.COMMAND)
    from ray.exceptions import RayTaskError
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from reward_loop.verl.task_runner import TaskRunner

    _check_manager(settings)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        with_ray(lambda: run_ppo(config, task_runner_class=task_runner or TaskRunner))
    except RayTaskError as error:
        if isinstance(error.cause, RewardLoopError):
            raise error.cause from None
        raise


def check_function(settings: RewardSettings) -> None:
    """Loads the user's function, so that an error appears before the minutes of start-up.

    Classes are not instantiated here, because the constructor may load a model.

    Raises:
        FunctionLoadError: the function cannot be loaded, or requires an argument that the reward loop does not provide.
        ConfigError: a component has a ``post_process_scores`` that would not be called.
    """
    if settings.function is not None:
        function = settings.function.load()
        name = settings.manager.name
        if not isinstance(function, type) and name in manager_names():
            scoring_function(get_manager(name), function, settings.options, reward_kwargs=settings.function.kwargs)
    for key, component in settings.options.components.items():
        if component.path:
            function = load_function(component.path, component.name)
            if hasattr(function, "post_process_scores"):
                raise ConfigError(
                    f"reward_loop.components.{key}: post_process_scores of a component is not called, only that of "
                    "custom_reward_function. Remove the method, or normalise in compute_score"
                )
            if not isinstance(function, type):
                ScoringFunction(function, reward_kwargs=component.reward_kwargs)


def _check_model(settings: RewardSettings, model: RewardModelConfig) -> None:
    option = "reward_model.model.path"
    names = architectures(str(model.model_path), option)
    kind = model_kind(str(model.model_path), option) if model.kind == "auto" else model.kind
    if not settings.scores_by_model:
        return
    if kind == "generative":
        raise ConfigError(
            f"{option}={model.model_path} is a generative model, and needs a function that asks it for a score: set "
            "custom_reward_function.path to a file whose compute_score takes reward_router_address. Only a "
            "discriminative model scores without a function"
        )
    if model.engine == "vllm" and (by_token := next((name for name in names if name.endswith("RewardModel")), None)):
        raise ConfigError(
            f"{option}={model.model_path}: vLLM does not answer /classify for {by_token}, only /pooling, with numbers "
            "for each token. Set reward_model.rollout.name=sglang, or custom_reward_function.path to a function that "
            "computes the score from them"
        )


def _check_manager(settings: RewardSettings) -> None:
    """Raises `ConfigError` if the manager's name is unknown here and in verl."""
    manager, function = settings.manager, settings.function
    if manager.is_import_path or manager.name in manager_names():
        return
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    if manager.name not in REWARD_MANAGER:
        known = sorted({*manager_names(), *REWARD_MANAGER})
        raise ConfigError(
            f"reward_model.reward_manager={manager.name}: unknown{did_you_mean(manager.name, known) or '.'} Known: "
            f"{listing(known)}" + (f", and the names that {function.path} registers" if function else "")
        )


def _cpu_environment(config: DictConfig) -> dict[str, str]:
    """Returns `CPU_ENVIRONMENT`, without the loopback interface if ranks on several nodes must reach each other."""
    environment = dict(CPU_ENVIRONMENT)
    if config.trainer.nnodes > 1 and joins_running_ray(config.ray_kwargs.ray_init.get("address")):
        del environment["GLOO_SOCKET_IFNAME"]
    return environment


def _prepare_cpu(config: DictConfig, server_cpus: int) -> None:
    """Sets the options of a CPU run that the user has not set."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if config.trainer.v1.trainer_mode == "separate_async":
        bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
        if config.trainer.v1.separate_async.parameter_sync_step > 1 and not bypass:
            # verl saves the old policy with `.cpu()`, which makes no copy on a CPU: it would change with the new one.
            raise ConfigError(
                "trainer.v1.separate_async.parameter_sync_step > 1 gives wrong old log-probabilities on a CPU: set it "
                "to 1, or algorithm.rollout_correction.bypass_mode=True"
            )
        rollout = config.actor_rollout_ref.rollout
        ranks += rollout.n_gpus_per_node * rollout.nnodes
        if rollout.checkpoint_engine.backend == "naive":
            rollout.checkpoint_engine.backend = "ray"
            rollout.checkpoint_engine.custom_backend_module = "reward_loop.verl.cpu.checkpoint"
    ray_init = config.ray_kwargs.ray_init
    if joins_running_ray(ray_init.get("address")):
        prepare_to_join(ray_init, {name: os.environ[name] for name in CPU_ENVIRONMENT if name in os.environ})
        return
    # Logical GPUs and CPUs of Ray: verl's actors request them, and verl waits silently if there are too few.
    if ray_init.num_gpus is None:
        ray_init.num_gpus = ranks
    if ray_init.num_cpus is None:
        ray_init.num_cpus = 8 + 4 * ranks + config.reward.num_workers + server_cpus
    if ray_init.object_store_memory is None:
        ray_init.object_store_memory = OBJECT_STORE_BYTES
    # Without the dashboard, Ray starts two processes fewer.
    with open_dict(ray_init):
        ray_init.setdefault("include_dashboard", False)


@contextmanager
def _preloaded(config: DictConfig) -> Iterator[None]:
    """Makes Ray fork its workers from a process with preloaded modules.

    Has no effect outside Linux, for an existing Ray cluster, or if the user has set ``py_executable``.
    """
    ray_init = config.ray_kwargs.ray_init
    joins = joins_running_ray(ray_init.get("address"))
    if sys.platform != "linux" or joins or OmegaConf.select(ray_init, "runtime_env.py_executable"):
        yield
        return
    with preloaded() as executable:
        with open_dict(ray_init):
            OmegaConf.update(ray_init, "runtime_env.py_executable", executable)
        yield


@hydra.main(config_path=str(CONFIG_DIR), config_name="reward_loop_trainer", version_base=None)
def _main(config: DictConfig) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        run(config)
    except RewardLoopError as error:
        _stop(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        _stop("Interrupted: everything that was started has been stopped.", 130)


def _interrupt_once(number: int, frame: object) -> NoReturn:
    """Stops the run at the first Ctrl-C, and ignores further ones, so that the shutdown can finish."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _stop(message: str, status: int) -> NoReturn:
    """Prints an error message and exits. Shuts Ray down first, so that its logs do not follow the message."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    print(f"\n{message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Runs the command ``python -m reward_loop.verl.main_ppo``."""
    try:
        compat.check_version()
    except compat.VerlVersionError as error:
        _stop(str(error), 1)
    searchpath = f"hydra.searchpath=[file://{verl_config_dir()},file://{CONFIG_DIR}]"
    # Insert it directly before the first override: Hydra accepts flags before or after the overrides, not between.
    first = (i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-"))
    sys.argv.insert(next(first, len(sys.argv)), searchpath)
    _main()


if __name__ == "__main__":
    main()
