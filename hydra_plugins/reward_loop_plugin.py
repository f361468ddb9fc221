"""Adds reward_loop to verl's own command, ``python -m verl.trainer.main_ppo``.

Hydra imports this module in every program that uses Hydra, because it is in the package ``hydra_plugins``. Invariants:

- A run of verl that does not use reward_loop has the same configuration as without it, and imports nothing of it: it
  works even if reward_loop is broken. So this module imports only Hydra and OmegaConf.
- reward_loop is on if ``reward_model.use_reward_loop`` is true or the trainer mode is ``reward_pipeline``, on the
  command line or in a file. Without that, one of its options on the command line is an error.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

SWITCH = "reward_model.use_reward_loop"
MODE = "trainer.v1.trainer_mode"
PIPELINE = "reward_pipeline"
OURS = (
    "reward_loop",
    SWITCH,
    "reward_model.server",
    "trainer.v1.reward_pipeline",
    "trainer.v1.sampler.poll_interval_s",
    "trainer.v1.sampler.stall_timeout_s",
    "trainer.v1.separate_async.reward_queue",
)
"""The options of ``reward_loop_options.yaml``."""


class RewardLoopSearchPath(SearchPathPlugin):
    """Lets Hydra find the files of reward_loop, and verl's command call it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path of verl's command, and the command itself. Other programs stay as they are."""
        command, spec = _verls_command(search_path), importlib.util.find_spec("reward_loop")
        if command is None or spec is None or spec.origin is None:
            return
        folder, ours = Path(spec.origin).parent / "verl", [word for word in sys.argv[1:] if _is_ours(word)]
        fits = all(hasattr(command, name) for name in ("auto_set_device", "run_ppo"))
        search_path.append("reward_loop", f"file://{folder}/config")
        if ours:
            from reward_loop.verl.main_ppo import check_command

            check_command(ours, fits=fits)
        without_plus = [word for word in ours if not word.startswith("+")]
        if without_plus:
            # See known/legacy_reward_impl.yaml. The two other folders have the files that it includes.
            search_path.prepend("reward_loop", f"file://{folder}/config/known")
            search_path.append("reward_loop", f"file://{folder}")
            search_path.append("reward_loop", f"file://{Path(str(command.__file__)).parent}")
        if fits:
            _take_over(command, without_plus)


def _verls_command(search_path: ConfigSearchPath) -> ModuleType | None:
    """Return the module whose ``main`` Hydra runs, if it is verl's."""
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").parts[-3:] == ("verl", "trainer", "main_ppo.py"):
        return main
    # A program that imports verl's `main` and calls it. Hydra makes this path of the name of the function's module.
    if any(item.path == "pkg://verl.trainer/config" for item in search_path.get_path()):
        return sys.modules.get("verl.trainer.main_ppo")
    return None


def _is_ours(word: str) -> bool:
    """Return whether a word of the command line is an option of reward_loop."""
    key = "" if word.startswith("-") else word.lstrip("+~").partition("=")[0]
    return word == f"{MODE}={PIPELINE}" or any(f"{key}.".startswith(f"{name}.") for name in OURS)


def _take_over(command: Any, ours: list[str]) -> None:
    """Let verl's ``main`` call reward_loop if it is on: at its first look at the configuration, and to train.

    ``ours`` are the options of reward_loop on the command line, which are an error if it is off.
    """
    auto_set_device, run_ppo = command.auto_set_device, command.run_ppo
    if auto_set_device.__module__ == __name__:  # Hydra asks for the search path again if `main` composes anything
        return

    def start(config: DictConfig) -> None:
        command.run_ppo = run_ppo  # with --multirun, `main` runs several times
        on = _is_on(config)
        without_effect = [word for word in ours if not word.startswith(f"{SWITCH}=")]
        if without_effect and not on:
            sys.exit(
                f"\nConfigError: {', '.join(without_effect)} has no effect, because reward_loop is off. Leave it out, "
                f"or set {MODE}={PIPELINE} or {SWITCH}=True"
            )
        if on:
            from reward_loop.verl.main_ppo import begin

            command.run_ppo = begin(config, run_ppo)
        auto_set_device(config)

    command.auto_set_device = start


def _is_on(config: DictConfig) -> bool:
    return bool(
        OmegaConf.select(config, SWITCH)
        or OmegaConf.select(config, MODE) == PIPELINE
        or config.get("mini_batch_pipeline")
    )
