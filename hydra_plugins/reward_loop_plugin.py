"""Adds reward_loop to verl's own command, ``python -m verl.trainer.main_ppo``.

Hydra imports this module in every program that uses Hydra, because it is in the package ``hydra_plugins``. Invariants:

- A run of verl that does not use reward_loop has the same configuration as without it, and imports nothing of it: it
  works even if reward_loop is broken. So this module imports only Hydra and OmegaConf.
- reward_loop is on if ``reward_model.use_reward_loop`` is true or the trainer mode is ``reward_pipeline``, on the
  command line or in a file. An option of reward_loop that would have no effect is an error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

SWITCH = "reward_model.use_reward_loop"
MODE = "trainer.v1.trainer_mode"
PIPELINE = "reward_pipeline"
OURS = (
    "reward_loop",
    SWITCH,
    "reward_model.launch_reward_fn_async",
    "reward_model.server",
    "trainer.v1.reward_pipeline",
    "trainer.v1.sampler.poll_interval_s",
    "trainer.v1.separate_async.reward_queue",
)
"""The options of ``reward_loop_options.yaml``."""
VERLS_GROUPS = ("custom_reward_function", "reward_model", "sandbox_fusion")
"""The old groups about rewards that verl accepts and ignores."""
CPU_ROLLOUT = "transformers"
"""``actor_rollout_ref.rollout.name`` of ``--config-name cpu``."""
TURN_ON = f"{MODE}={PIPELINE} or {SWITCH}=True"


class RewardLoopSearchPath(SearchPathPlugin):
    """Lets Hydra find the files of reward_loop, and verl's command call it."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path of verl's command, and the command itself. Other programs stay as they are."""
        command, spec = _verls_command(search_path), importlib.util.find_spec("reward_loop")
        if command is None or spec is None or spec.origin is None:
            return
        folder, words = Path(spec.origin).parent / "verl", sys.argv[1:]
        search_path.append("reward_loop", f"file://{folder}/config")
        trainer = Path(str(command.__file__)).parent
        fits = all(hasattr(command, name) for name in ("auto_set_device", "run_ppo"))
        fits = fits and (trainer / "config" / "legacy_reward_impl.yaml").exists()
        if any(_is_ours(word) for word in words):
            from reward_loop.verl.main_ppo import check_command

            check_command(words, fits=fits)
        if any(_is_ours(word) and not word.startswith("+") for word in words):
            # See known/legacy_reward_impl.yaml. The two other folders have the files that it includes.
            search_path.prepend("reward_loop", f"file://{folder}/config/known")
            search_path.append("reward_loop", f"file://{folder}")
            search_path.append("reward_loop", f"file://{trainer}")
        for word in words:
            if (name := _resembles(word)) is not None:  # Hydra refuses the option, unless it is one of the user's own
                print(f"{word}: did you mean {name}, an option of reward_loop?", file=sys.stderr)
        if fits:
            _take_over(command, folder / "config" / "reward_loop_options.yaml")


def _verls_command(search_path: ConfigSearchPath) -> ModuleType | None:
    """Return the module whose ``main`` Hydra runs, if it is verl's."""
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").parts[-3:] == ("verl", "trainer", "main_ppo.py"):
        return main
    # A program that imports verl's `main` and calls it. Hydra makes this path of the name of the function's module.
    if any(item.path == "pkg://verl.trainer/config" for item in search_path.get_path()):
        return sys.modules.get("verl.trainer.main_ppo")
    return None


def _key(word: str) -> str:
    return "" if word.startswith("-") else word.lstrip("+~").partition("=")[0]


def _is_ours(word: str) -> bool:
    """Return whether a word of the command line is an option of reward_loop."""
    key = _key(word)
    return word == f"{MODE}={PIPELINE}" or any(f"{key}.".startswith(f"{name}.") for name in OURS)


def _resembles(word: str) -> str | None:
    """Return the option of reward_loop that a word of the command line may be a misspelling of."""
    parts = _key(word).split(".")
    for name in OURS:
        *group, last = name.split(".")
        given = parts[len(group)] if parts[: len(group)] == group and len(parts) > len(group) else last
        if given != last and get_close_matches(given, [last], cutoff=0.8):
            return name
    return None


def _take_over(command: Any, options: Path) -> None:
    """Let verl's ``main`` call reward_loop if it is on: at its first look at the configuration, and to train."""
    auto_set_device, run_ppo = command.auto_set_device, command.run_ppo
    if auto_set_device.__module__ == __name__:  # Hydra asks for the search path again if `main` composes anything
        return

    def start(config: DictConfig) -> None:
        command.run_ppo = run_ppo  # with --multirun, `main` runs several times
        on = _is_on(config)
        if not on:
            given = _given(config, options)
            mode = str(OmegaConf.select(config, MODE))
            # With options of reward_loop, an unknown mode may have been meant to turn it on.
            if given or get_close_matches(mode, [PIPELINE], cutoff=0.8):
                from reward_loop.verl.main_ppo import check_trainer_mode

                check_trainer_mode(mode)
            _check_unused(config, given)
        if on or OmegaConf.select(config, "actor_rollout_ref.rollout.name") == CPU_ROLLOUT:
            from reward_loop.verl.main_ppo import begin

            command.run_ppo = begin(config, run_ppo, on=on)
        auto_set_device(config)

    command.auto_set_device = start


def _is_on(config: DictConfig) -> bool:
    return bool(
        OmegaConf.select(config, SWITCH)
        or OmegaConf.select(config, MODE) == PIPELINE
        or config.get("mini_batch_pipeline")
    )


def _given(config: DictConfig, options: Path) -> dict[str, Any]:
    """Return the options of reward_loop that are set, although it is off."""
    if all(OmegaConf.select(config, name) is None for name in OURS):
        return {}
    given = dict(_set(config, OmegaConf.load(options)))
    # A manager of this library in verl's reward loop reads them. With `known`, all options are there.
    if OmegaConf.select(config, "reward.reward_manager.source") == "importlib":
        if OmegaConf.select(config, "reward_loop.check") is None:
            given = {key: value for key, value in given.items() if not key.startswith("reward_loop.")}
        elif given:
            _stop(f"{_listed(given)}: for a reward manager in verl's own reward loop, write a + before the option")
    return given


def _check_unused(config: DictConfig, given: dict[str, Any]) -> None:
    """Stop if options of reward_loop are set, which is off; warn of old keys, which only reward_loop reads."""
    if given:
        _stop(f"{_listed(given)} has no effect, because reward_loop is off. Leave it out, or set {TURN_ON}")
    old = [key for group in VERLS_GROUPS for key, _ in _leaves(group, config.get(group)) if not _is_ours(key)]
    if old:
        print(
            f"warning: verl ignores {', '.join(old)}. Write reward.custom_reward_function and reward.reward_model for "
            f"custom_reward_function and reward_model; or use reward_loop, which reads them: {TURN_ON}",
            file=sys.stderr,
        )


def _set(config: DictConfig, options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of reward_loop that differ from their defaults."""
    for name in OURS:
        default = dict(_leaves(name, OmegaConf.select(options, name)))
        for key, value in _leaves(name, OmegaConf.select(config, name)):
            if key != SWITCH and value != default.get(key):
                yield key, value


def _leaves(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a group with their names, without those that are null."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _leaves(f"{key}.{name}", value)
    elif node is not None:
        yield key, OmegaConf.to_container(node) if isinstance(node, ListConfig) else node


def _listed(given: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())


def _stop(message: str) -> NoReturn:
    print(f"\nConfigError: {message}", file=sys.stderr)
    sys.exit(1)
