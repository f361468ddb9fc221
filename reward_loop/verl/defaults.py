"""The defaults of all options, verl's and those of the reward loop, from the files that hold them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from reward_loop.config import RewardModelConfig
from reward_loop.managers.rate_limited import RateLimitedConfig

__all__ = ["CONFIG_DIR", "defaults", "verl_config_dir"]

CONFIG_DIR = Path(__file__).parent / "config"
"""Where the Hydra configuration of the reward loop lies."""


def verl_config_dir() -> Path:
    """Where the installed verl keeps its Hydra configuration. Found without importing verl."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "trainer" / "config"


@functools.cache
def defaults() -> DictConfig:
    """The groups that say how rewards are made, with every option that is known there. Read-only."""
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
