"""What reward_loop does in verl's command, ``python -m verl.trainer.main_ppo``, and in recipes, before Ray starts.

The plug-in of Hydra (``hydra_plugins/reward_loop_plugin.py``) calls `check_command` before the configuration is
composed, and `begin` before the first call of verl's ``main``. ``python -m reward_loop.verl.main_ppo`` is verl's
command with the reward loop turned on.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from reward_loop.config import RewardModelConfig
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase, scoring_function
from reward_loop.serving.models import model_kind
from reward_loop.verl.installed import VerlVersionError, check_version, installed_version
from reward_loop.verl.options import RewardSettings, resolve

__all__ = ["main", "run"]

UNTESTED = "reward_loop.untested_verl"
"""The option that accepts another release of verl."""


def run(config: DictConfig, task_runner: Any = None) -> None:
    """Check the configuration, and run the training: what verl's ``run_ppo`` does in a recipe with its own ``main``.

    With ``reward_loop.check=True``, return before Ray starts.

    Args:
        config: the composed Hydra configuration; changed in place.
        task_runner: a Ray actor class that replaces `TaskRunner`, for recipes with a task runner of their own.

    Raises:
        RewardLoopError: an option is wrong, the reward function cannot be loaded, the reward model does not start, or
            the rewards fail in a way that must stop the run.
    """
    train = _prepare(config, task_runner)
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    train(run_ppo)


def begin(config: DictConfig, run_ppo: Callable[..., None]) -> Callable[..., None]:
    """Check the configuration of verl's command, before verl does, and return what replaces its ``run_ppo``.

    A wrong option, Ctrl-C, and rewards that fail in a way that must stop the run, end the process with a message.

    Args:
        config: the composed configuration; changed in place.
        run_ppo: verl's function.
    """
    # Only in place of Python's handler: a program that calls verl's `main` may have its own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    with _ending():
        train = _prepare(config, None)

    def replacement(config: DictConfig, task_runner_class: Any) -> None:
        with _ending():
            train(run_ppo)

    return replacement


def _prepare(config: DictConfig, task_runner: Any) -> Callable[[Callable[..., None]], None]:
    """Check all that does not need verl's own checks, and return the function that trains with verl's ``run_ppo``.

    Args:
        config: the composed configuration; changed in place.
        task_runner: the task runner of a recipe, or ``None``.
    """
    check_version(untested=bool(OmegaConf.select(config, UNTESTED)))
    # Container images often set it. Each of the hundreds of processes of a run would compile all its modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    only_checks = bool(OmegaConf.select(config, "reward_loop.check"))
    settings = resolve(config)
    check_function(settings)
    if settings.model is not None and settings.scores_by_model:
        _check_model(settings.model)

    def train(run_ppo: Callable[..., None]) -> None:
        from ray.exceptions import RayTaskError

        from reward_loop.verl.run.task_runner import TaskRunner

        if only_checks:
            print("The options are valid, and the reward function loads. Nothing was started: reward_loop.check=True")
            return
        try:
            run_ppo(config, task_runner_class=task_runner or TaskRunner)
        except RayTaskError as error:
            if isinstance(error.cause, RewardLoopError):
                # Our message alone, without the traceback of the task runner.
                raise error.cause from None
            raise

    return train


def check_command(words: Sequence[str], *, fits: bool) -> None:
    """End the process with a message if the installed verl is another one.

    Args:
        words: the command line, which turns the reward loop on or has one of its options.
        fits: whether verl's command has what the plug-in of Hydra needs.
    """
    with _ending():
        check_version(untested=f"{UNTESTED}=True" in (word.lstrip("+") for word in words))
        if not fits:
            raise VerlVersionError(f"the command of verl {installed_version()} lacks what reward_loop replaces in it")


def check_function(settings: RewardSettings) -> None:
    """Load the user's function, so that an error appears before the minutes of start-up.

    Classes are not instantiated here, because the constructor may load a model.

    Raises:
        FunctionLoadError: the function cannot be loaded, or requires an argument that the reward loop does not provide.
        ConfigError: the manager cannot be loaded, is not one, or needs a function.
    """
    function = None if settings.function is None else settings.function.load()  # may register the manager
    manager = settings.manager.load()
    ours = isinstance(manager, type) and issubclass(manager, RewardLoopManagerBase)
    if settings.function is not None and ours and not isinstance(function, type):
        scoring_function(manager, function, settings.options, reward_kwargs=settings.function.kwargs)


def _check_model(model: RewardModelConfig) -> None:
    option = "reward.reward_model.model_path"
    if (model_kind(str(model.model_path), option) if model.kind == "auto" else model.kind) == "generative":
        raise ConfigError(
            f"{option}={model.model_path} is a generative model, and needs a function that asks it for a score: set "
            "custom_reward_function.path to a file whose compute_score takes reward_router_address. Only a "
            "discriminative model scores without a function"
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


def _stop(message: str, status: int) -> NoReturn:
    """Print an error message and exit. Shuts Ray down first, so that its logs do not follow the message."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    print(f"\n{message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Run verl's command with the reward loop turned on."""
    words = sys.argv
    if not any(word.lstrip("+").startswith("reward_model.use_reward_loop=") for word in words):
        # Before the first override: Hydra accepts flags before or after the overrides, not between.
        first = (i for i, word in enumerate(words) if i and "=" in word and not word.startswith("-"))
        words.insert(next(first, len(words)), "reward_model.use_reward_loop=True")
    check_command(words, fits=True)  # before verl is imported
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
