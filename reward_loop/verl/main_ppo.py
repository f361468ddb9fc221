"""``python -m reward_loop.verl.main_ppo <verl options>``: verl's PPO trainer, with rewards from the reward loop.

The options are those of verl and of ``reward_loop/verl/config``. ``--config-name cpu`` runs without a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from reward_loop._util.text import did_you_mean, listing
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import scoring_function
from reward_loop.managers.registry import get as get_manager
from reward_loop.managers.registry import names as manager_names
from reward_loop.scoring import ScoringFunction
from reward_loop.scoring.load import load_function
from reward_loop.serving.checkpoint import model_kind
from reward_loop.serving.models import served_models
from reward_loop.verl import compat
from reward_loop.verl.cpu.preload import preloaded
from reward_loop.verl.defaults import CONFIG_DIR, verl_config_dir
from reward_loop.verl.resolve import reward_loop_options, settle
from reward_loop.verl.reward_model import reward_model_options, scores_by_model

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "reward_loop.verl.cpu.plugin",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default timeout is 30 s, which can be too short on a busy laptop.
    "RAY_raylet_start_wait_time_s": "300",
    # By default, Ray runs workers at nice 15, so all other processes of the machine have priority.
    "RAY_worker_niceness": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
"""Environment variables for a run on a CPU. Values that the user has set take precedence."""


def run(config: DictConfig) -> None:
    """Checks the configuration, and runs the training.

    Args:
        config: the composed Hydra configuration; changed in place.

    Raises:
        RewardLoopError: an option is wrong, the reward function cannot be loaded, the reward model does not start, or
            the rewards fail in a way that must stop the run.
    """
    if config.trainer.device == "cpu":
        # Do this before loading the user's function: its file may import verl, which chooses its platform at import.
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    settle(config, given=HydraConfig.get().overrides.task if HydraConfig.initialized() else ())
    _check_function(config)
    in_ray = 0
    model = reward_model_options(config)
    if model is not None:
        kind = model_kind(str(model.model_path), "reward_model.model.path")
        if (kind if model.kind == "auto" else model.kind) == "generative" and scores_by_model(config):
            raise ConfigError(
                f"reward_model.model.path={model.model_path} is a generative model, and no function says what to ask "
                "it: set custom_reward_function.path to a file whose compute_score takes reward_router_address. Only a "
                "discriminative model scores by itself"
            )
        served = served_models(model)
        in_ray = sum(one.replicas * one.threads for one in served) if model.placement == "ray" else 0
    if config.trainer.device == "cpu":
        _prepare_cpu(config, in_ray)
        with _preloaded(config):
            _train(config)
    else:
        _train(config)


def _train(config: DictConfig) -> None:
    # verl chooses its platform at import, so import it only here.
    compat.check(compat.COMMAND)
    from ray.exceptions import RayTaskError
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from reward_loop.verl.task_runner import TaskRunner

    _check_manager(config)
    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    try:
        run_ppo(config, task_runner_class=TaskRunner)
    except RayTaskError as error:
        if isinstance(error.cause, RewardLoopError):
            raise error.cause from None
        raise


def _check_function(config: DictConfig) -> None:
    """Loads the user's function, so that an error appears before the minutes of start-up.

    Classes are not instantiated here, because the constructor may load a model.
    """
    options = reward_loop_options(config)
    custom = config.reward.custom_reward_function
    name = config.reward.reward_manager.name
    if custom.path:
        function = load_function(custom.path, custom.name)
        if not isinstance(function, type) and name in manager_names():
            scoring_function(get_manager(name), function, options, reward_kwargs=custom.get("reward_kwargs"))
    for key, component in options.components.items():
        if component.path:
            function = load_function(component.path, component.name)
            if hasattr(function, "post_process_scores"):
                raise ConfigError(
                    f"reward_loop.components.{key}: its post_process_scores would not be called: only "
                    "custom_reward_function's is. Remove the method, or normalise in compute_score"
                )
            if not isinstance(function, type):
                ScoringFunction(function, reward_kwargs=component.reward_kwargs)


def _check_manager(config: DictConfig) -> None:
    manager = config.reward.reward_manager
    if manager.source != "register" or manager.name in manager_names() or ":" in manager.name:
        return
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

    function = config.reward.custom_reward_function.path
    if manager.name not in REWARD_MANAGER:
        known = sorted({*manager_names(), *REWARD_MANAGER})
        raise ConfigError(
            f"reward_model.reward_manager={manager.name}: unknown{did_you_mean(manager.name, known) or '.'} "
            f"Known: {listing(known)}" + (f", and what {function} registers" if function else "")
        )


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
    # Logical GPUs and CPUs of Ray: verl's actors request them, and verl waits silently if there are too few.
    if config.ray_kwargs.ray_init.num_gpus is None:
        config.ray_kwargs.ray_init.num_gpus = ranks
    # Without the dashboard, Ray starts two processes fewer.
    with open_dict(config.ray_kwargs.ray_init):
        config.ray_kwargs.ray_init.setdefault("include_dashboard", False)
    if config.ray_kwargs.ray_init.num_cpus is None:
        config.ray_kwargs.ray_init.num_cpus = 8 + 4 * ranks + config.reward.num_workers + server_cpus


@contextmanager
def _preloaded(config: DictConfig) -> Iterator[None]:
    """Makes Ray fork its workers from a process with preloaded modules.

    Has no effect outside Linux, for an existing Ray cluster, or if the user has set ``py_executable``.
    """
    ray_init = config.ray_kwargs.ray_init
    joins = ray_init.get("address") or os.environ.get("RAY_ADDRESS")
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
    compat.warn_of_version()
    searchpath = f"hydra.searchpath=[file://{verl_config_dir()},file://{CONFIG_DIR}]"
    # Insert it directly before the first override: Hydra accepts flags before or after the overrides, not between.
    first = (i for i, word in enumerate(sys.argv) if i and "=" in word and not word.startswith("-"))
    sys.argv.insert(next(first, len(sys.argv)), searchpath)
    _main()


if __name__ == "__main__":
    main()
