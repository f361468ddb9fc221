"""The defaults of all reward options, read from the configuration files of verl and of the reward loop."""

from __future__ import annotations

import functools
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from reward_loop.config import RewardModelConfig
from reward_loop.managers.builtin import RateLimitedConfig
from reward_loop.verl.compat import verl_folder

__all__ = ["CONFIG_DIR", "defaults", "verl_config_dir"]

CONFIG_DIR = Path(__file__).parent / "config"
"""The directory of the reward loop's Hydra configuration."""


def verl_config_dir() -> Path:
    """Returns the directory of verl's Hydra configuration, without importing verl."""
    return verl_folder() / "trainer" / "config"


@functools.cache
def defaults() -> DictConfig:
    """Returns the option groups about rewards, with every known option and its default. Read-only."""
    directory = verl_config_dir()
    merged = OmegaConf.merge(
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
    OmegaConf.set_readonly(merged, True)
    return merged
