"""What reward_loop does in verl's command, ``python -m verl.trainer.main_ppo``, and in recipes, before Ray starts.

The plug-in of Hydra (``hydra_plugins/reward_loop_plugin.py``) calls `check_command` before the configuration is
composed, and `begin` before the first call of verl's ``main``. ``python -m reward_loop.verl.main_ppo`` is verl's
command with the reward loop turned on.
"""

from __future__ import annotations

import inspect
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from reward_loop._util.process import descendants, kill
from reward_loop._util.text import did_you_mean, listing
from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase, scoring_function
from reward_loop.managers.registry import names as manager_names
from reward_loop.scoring import ScoringFunction, load_function
from reward_loop.serving.models import architectures, model_kind
from reward_loop.verl import compat
from reward_loop.verl.compat import uses
from reward_loop.verl.cpu.setup import prepared, run_environment
from reward_loop.verl.mode_options import PIPELINE_MODE
from reward_loop.verl.resolve import resolve, unknown_overrides
from reward_loop.verl.settings import RewardSettings, verl_config_dir

__all__ = ["main", "run"]


uses(__name__, "verl.trainer.main_ppo", "auto_set_device(config)", "run_ppo(config, task_runner_class)")
uses(__name__, "verl.plugin.platform", "get_platform()", "set_platform(platform)")
uses(__name__, "verl.trainer.ppo.utils", "need_critic(config)", "need_reference_policy(config)")
uses(__name__, "verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY")
uses(__name__, "verl.utils.config", "validate_config(config, use_reference_policy, use_critic)")
uses(__name__, "verl.utils.device", "auto_set_device(config)")
uses(__name__, "verl.experimental.reward_loop.reward_manager.registry", "REWARD_MANAGER")

STARTS = 4
"""The largest number of attempts to start Ray."""

START_TIMED_OUT = "The current node timed out during startup"
"""Ray's error if its node is not ready after 30 s. The usual cause on a busy machine is that an agent of the node takes
more than 15 s to start: the node ends then. No option changes this limit (https://github.com/ray-project/ray/issues/65983)."""

INCLUDED = "legacy_reward_impl.yaml"
"""The file of verl's configuration that the plug-in of Hydra replaces by one of the same name."""

T = TypeVar("T")


def run(config: DictConfig, task_runner: Any = None) -> None:
    """Check the configuration, and run the training: what verl's ``run_ppo`` does in a recipe with its own ``main``.

    With ``reward_loop.check=True``, return before Ray starts.

    Args:
        config: the composed Hydra configuration; changed in place.
        task_runner: a Ray actor class that replaces `TaskRunner`, for recipes with a task runner of their own. A
            ``runtime_env`` of its decorator has no effect: set ``ray_kwargs.ray_init.runtime_env``.

    Raises:
        RewardLoopError: an option is wrong, the reward function cannot be loaded, the reward model does not start, or
            the rewards fail in a way that must stop the run.
    """
    with ExitStack() as opened:
        train = _prepare(config, opened, task_runner)
        from verl.trainer.main_ppo import run_ppo
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
        from verl.utils.device import auto_set_device

        auto_set_device(config)
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
        train(run_ppo)


def begin(config: DictConfig, run_ppo: Callable[..., None], *, on: bool) -> Callable[..., None]:
    """Check the configuration of verl's command, before verl does, and return what replaces its ``run_ppo``.

    A wrong option, Ctrl-C, and rewards that fail in a way that must stop the run, end the process with a message.

    Args:
        config: the composed configuration; changed in place.
        run_ppo: verl's function.
        on: whether the reward loop scores the rollouts. Otherwise verl does, on a CPU.
    """
    # Only in place of Python's handler: a program that calls verl's `main` may have its own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    # Closed by `replacement`, which verl calls after its own checks.
    opened = ExitStack()
    with _ending():
        if on:
            train = _prepare(config, opened, None)
        else:
            _choose_cpu(config)
            opened.enter_context(prepared(config, None))

    def replacement(config: DictConfig, task_runner_class: Any) -> None:
        with _ending(), opened:
            if on:
                train(run_ppo)
            else:
                with_ray(lambda: run_ppo(config, task_runner_class))

    return replacement


def _prepare(config: DictConfig, opened: ExitStack, task_runner: Any) -> Callable[[Callable[..., None]], None]:
    """Check all that does not need verl's own checks, and return the function that trains with verl's ``run_ppo``.

    Args:
        config: the composed configuration; changed in place.
        opened: receives what must stay open during the training.
        task_runner: the task runner of a recipe, or ``None``.
    """
    compat.check_version()
    # Container images often set it. Each of the hundreds of processes of a run would compile all its modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    on_cpu = config.trainer.device == "cpu"
    if on_cpu:
        # Do this before loading the user's function: its file may import verl, which chooses its platform at import.
        _choose_cpu(config)
    # verl chooses its platform at import, so a recipe imports it only here.
    compat.check(*compat.COMMAND)
    if task_runner is None:
        _check_trainer_mode(config.trainer.v1.trainer_mode)
    check_only = _check_only(config)
    settings = resolve(config, given=HydraConfig.get().overrides.task if HydraConfig.initialized() else ())
    check_function(settings)
    if settings.model is not None and settings.model.model_path:  # external servers may have no path
        _check_model(settings, settings.model)
    _check_manager(settings)
    if on_cpu:
        opened.enter_context(prepared(config, settings.model))

    def train(run_ppo: Callable[..., None]) -> None:
        from ray.exceptions import RayTaskError

        from reward_loop.verl.task_runner import TaskRunner

        if check_only:
            print("The options are valid, and the reward function loads. Nothing was started: reward_loop.check=True")
            return
        try:
            with_ray(lambda: run_ppo(config, task_runner_class=task_runner or TaskRunner))
        except RayTaskError as error:
            if isinstance(error.cause, RewardLoopError):
                # Our message alone, without the traceback of the task runner.
                raise error.cause from None
            raise

    return train


def _choose_cpu(config: DictConfig) -> None:
    """Set the environment of a run on a CPU. In verl's command, verl is already imported: replace its platform."""
    os.environ.update(run_environment(config))
    if "verl" in sys.modules:
        from verl.plugin.platform import get_platform, set_platform

        from reward_loop.verl.cpu.plugin import CPUPlatform

        if get_platform().device_name != "cpu":
            set_platform(CPUPlatform())


def _check_only(config: DictConfig) -> bool:
    value = OmegaConf.select(config, "reward_loop.check", default=False)
    if not isinstance(value, bool):
        raise ConfigError(f"reward_loop.check={value}: it must be True or False")
    return value


def check_command(words: Sequence[str], *, fits: bool) -> None:
    """End the process with a message if a word of verl's command line sets an unknown option of rewards.

    Hydra would advise to add a misspelt option.

    Args:
        words: the command line.
        fits: whether verl's command has what the plug-in of Hydra needs. Otherwise, the message names what is missing.
    """
    with _ending():
        compat.check_version()
        if not fits:
            compat.check("main_ppo")
            raise compat.VerlVersionError(f"verl {compat.installed_version()} has no {verl_config_dir()}/{INCLUDED}")
        if unknown := list(unknown_overrides(words)):
            raise ConfigError("\n".join(unknown))


def check_trainer_mode(name: str) -> None:
    """End the process with a message if neither this library nor verl has a trainer with this name."""
    with _ending():
        _check_trainer_mode(name)


def check_function(settings: RewardSettings) -> None:
    """Load the user's function, so that an error appears before the minutes of start-up.

    Classes are not instantiated here, because the constructor may load a model.

    Raises:
        FunctionLoadError: the function cannot be loaded, or requires an argument that the reward loop does not provide.
        ConfigError: the manager cannot be loaded, is not one, or needs a function; or a component has a
            ``post_process_scores`` that would not be called.
    """
    function = None if settings.function is None else settings.function.load()  # may register the manager
    manager = settings.manager.load()
    if manager is not None and not settings.scores_by_model:
        _check_constructor(manager, settings)
    ours = isinstance(manager, type) and issubclass(manager, RewardLoopManagerBase)
    if settings.function is not None and ours and not isinstance(function, type):
        scoring_function(manager, function, settings.options, reward_kwargs=settings.function.kwargs)
    if settings.function is not None and settings.model is None and _requires_address(function):
        print(
            f"warning: {settings.function.path} requires reward_router_address, which will be None, since no reward "
            "model is served. Set reward.reward_model.enable=True and its model, or give the argument a default"
        )
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


def _requires_address(function: Any) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("reward_router_address")
    except (TypeError, ValueError):  # an object or a class without a signature
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check_constructor(manager: type, settings: RewardSettings) -> None:
    """Raise `ConfigError` if the class of a manager does not take the arguments that a reward worker passes."""
    names = ("config", "tokenizer", "compute_score", "reward_router_address", "reward_model_tokenizer")
    try:
        inspect.signature(manager).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"reward manager {settings.manager.name}: reward workers create it with the arguments {', '.join(names)}; "
            f"its constructor does not accept these: {error}. Add **kwargs to __init__, and pass them to super()"
        ) from None
    except ValueError:  # a class without a signature
        return


def _check_model(settings: RewardSettings, model: RewardModelConfig) -> None:
    option = "reward.reward_model.model_path"
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
    """Raise `ConfigError` if the manager's name is unknown here and in verl."""
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


def _check_trainer_mode(name: str) -> None:
    """Raise `ConfigError` if neither this library nor verl has a trainer with this name."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    known = sorted({*TRAINER_REGISTRY, PIPELINE_MODE})
    if name not in known:
        raise ConfigError(
            f"trainer.v1.trainer_mode={name}: unknown{did_you_mean(name, known) or '.'} Known: {listing(known)}"
        )


@contextmanager
def _ending() -> Iterator[None]:
    """End the process with a message, instead of an error that stops the run, or of Ctrl-C."""
    try:
        yield
    except RewardLoopError as error:
        _stop(f"{type(error).__name__}: {error}", 1)
    except KeyboardInterrupt:
        _stop("Interrupted: everything that was started has been stopped.", 130)


def _interrupt_once(number: int, frame: object) -> NoReturn:
    """Stop the run at the first Ctrl-C, and ignore further ones, so that the shutdown can finish."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def with_ray(function: Callable[[], T]) -> T:
    """Call a function that starts Ray first, and call it again if the start timed out: at most `STARTS` calls.

    Ray leaves the other processes of such a node alive: a dashboard, a log monitor, an autoscaler. They are killed.

    Raises:
        Exception: any other error of the function, or the one of its last call.
    """
    import ray

    for start in range(1, STARTS):
        before = descendants(os.getpid())
        try:
            return function()
        except Exception as error:
            # If Ray runs, the error is one of the function itself.
            if ray.is_initialized() or START_TIMED_OUT not in str(error):
                raise
            for pid in set(descendants(os.getpid())).difference(before):
                kill(pid)
            print(f"Ray did not start in time: the machine is busy. Starting it again ({start + 1} of {STARTS}).")
    return function()


def _stop(message: str, status: int) -> NoReturn:
    """Print an error message and exit. Shuts Ray down first, so that its logs do not follow the message."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    print(f"\n{message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Run verl's command with the reward loop turned on; ``--check`` is ``reward_loop.check=True``."""
    words = ["reward_loop.check=True" if word == "--check" else word for word in sys.argv]
    if not any(word.lstrip("+").startswith("reward_model.use_reward_loop=") for word in words):
        # Before the first override: Hydra accepts flags before or after the overrides, not between.
        first = (i for i, word in enumerate(words) if i and "=" in word and not word.startswith("-"))
        words.insert(next(first, len(words)), "reward_model.use_reward_loop=True")
    sys.argv = words
    print(
        "warning: python -m reward_loop.verl.main_ppo goes away with the next release. Write python -m "
        "verl.trainer.main_ppo, and add reward_model.use_reward_loop=True or trainer.v1.trainer_mode=reward_pipeline",
        file=sys.stderr,
    )
    with _ending():
        compat.check_version()  # before verl is imported
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
