"""verl's configuration, composed as the command does it."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from reward_loop.verl.defaults import CONFIG_DIR, verl_config_dir
from reward_loop.verl.resolve import resolve
from reward_loop.verl.settings import RewardSettings


def configuration(*overrides: str, name: str = "reward_loop_trainer") -> DictConfig:
    searchpath = f"hydra.searchpath=[file://{verl_config_dir()}]"
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return compose(name, [searchpath, *overrides])


def resolved(*overrides: str, name: str = "reward_loop_trainer") -> RewardSettings:
    return resolve(configuration(*overrides, name=name), given=overrides)


def settled(*overrides: str, name: str = "reward_loop_trainer") -> DictConfig:
    """The whole configuration, with old keys moved to their successors."""
    return resolved(*overrides, name=name).config
