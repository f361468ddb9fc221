"""verl's configuration, composed as the command does it."""

from __future__ import annotations

import functools

from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from reward_loop.verl.resolve import resolve
from reward_loop.verl.settings import CONFIG_DIR, RewardSettings, verl_config_dir


def configuration(*overrides: str, name: str = "reward_loop_trainer") -> DictConfig:
    """Composes a configuration. Overrides that choose another file of verl have no effect.

    Records are off unless the overrides choose their folder: tests would write into the working directory.
    """
    stored = _stored(name)
    has_folder = any("log_dir" in override or "default_local_dir" in override for override in overrides)
    records = [] if has_folder else ["reward_loop.log_dir=null"]
    with initialize(config_path=None, version_base=None):
        return compose(stored, [*records, *overrides])


@functools.cache
def _stored(name: str) -> str:
    """Reads the files of verl once, which takes most of the time, and returns the name in Hydra's store."""
    searchpath = f"hydra.searchpath=[file://{verl_config_dir()}]"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        ConfigStore.instance().store(name=f"stored_{name}", node=compose(name, [searchpath]))
    return f"stored_{name}"


def resolved(*overrides: str, name: str = "reward_loop_trainer") -> RewardSettings:
    return resolve(configuration(*overrides, name=name), given=overrides)


def settled(*overrides: str, name: str = "reward_loop_trainer") -> DictConfig:
    """The whole configuration, with old keys moved to their successors."""
    return resolved(*overrides, name=name).config
