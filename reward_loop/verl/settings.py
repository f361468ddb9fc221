"""The settings of a run that concern rewards: one immutable object, made by :mod:`reward_loop.verl.resolve`."""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from reward_loop.config import RewardLoopConfig, RewardModelConfig
from reward_loop.managers import get as get_manager
from reward_loop.managers.builtin import RateLimitedConfig
from reward_loop.managers.registry import names as manager_names
from reward_loop.scoring import load_function
from reward_loop.verl.compat import verl_folder
from reward_loop.verl.mode_options import ModeOptions


@dataclass(frozen=True, slots=True)
class ManagerName:
    """The name of a reward manager: ``reward.reward_manager``."""

    name: str
    """A registered name or an import path; with ``source=importlib``, the name of the class in `module`."""
    source: str
    """``register`` or ``importlib``."""
    module: str | None
    """With ``source=importlib``: a file, or ``pkg://module``."""

    @property
    def is_import_path(self) -> bool:
        """Whether the user names a class by its location."""
        return self.source != "register" or ":" in self.name

    def load(self) -> Any:
        """Return the class, or ``None`` if the name is not registered here: it may be the name of a manager of verl.

        Raises:
            ConfigError: the class cannot be loaded, or is not a manager.
        """
        if self.source == "importlib":
            return get_manager(f"{self.module or ''}:{self.name}")
        return get_manager(self.name) if ":" in self.name or self.name in manager_names() else None


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The location of a reward function: ``reward.custom_reward_function``."""

    path: str
    name: str | None
    kwargs: Mapping[str, Any] | None
    """The option ``reward_kwargs``."""

    def load(self) -> Any:
        """Return the function, or the class.

        Raises:
            FunctionLoadError: the function cannot be loaded.
        """
        return load_function(self.path, self.name)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """All settings of a run that concern rewards, read once from verl's configuration, and checked."""

    config: DictConfig
    """verl's whole configuration, which managers receive. Read rewards' options from the other fields."""
    options: RewardLoopConfig
    """The group ``reward_loop``, combined with verl's options of the manager."""
    manager: ManagerName
    function: FunctionName | None
    """The user's function; without one, verl's functions by data source, or the reward model."""
    num_workers: int
    """The number of reward workers."""
    model: RewardModelConfig | None
    """The servers of the reward model, if there is one."""
    mode: ModeOptions
    """The trainer mode."""

    @property
    def scores_by_model(self) -> bool:
        """Whether the reward is the reward model's logit: the user has set neither a function nor a manager."""
        own = self.manager.is_import_path or self.manager.name == "composite"
        return self.model is not None and self.function is None and not own

    def __reduce__(self) -> tuple[Any, ...]:
        # Compressed: Ray passes an argument of at most 100 KB by value. It keeps a larger one in its object store, and
        # an actor cannot restart once that is lost. verl's configuration takes 110 KB, and 17 KB compressed.
        values = tuple(getattr(self, field.name) for field in fields(self))
        return _unpacked, (zlib.compress(pickle.dumps(values)),)

    def with_job(self, address: str) -> RewardSettings:
        """Return these settings with the address of the job's limiter service."""
        # A copy: the address contains a key, and verl prints and records the configuration of the run.
        config = deepcopy(self.config)
        config.reward_loop.job = address
        return replace(self, config=config, options=self.options.model_copy(update={"job": address}))


def _unpacked(packed: bytes) -> RewardSettings:
    return RewardSettings(*pickle.loads(zlib.decompress(packed)))


CONFIG_DIR = Path(__file__).parent / "config"
"""The directory of the reward loop's Hydra configuration."""


def verl_config_dir() -> Path:
    """Return the directory of verl's Hydra configuration, without importing verl."""
    return verl_folder() / "trainer" / "config"


def added_options() -> DictConfig:
    """Return the options that reward_loop adds to verl's configuration, with their defaults."""
    return OmegaConf.load(CONFIG_DIR / "reward_loop_options.yaml")


@functools.cache
def defaults() -> DictConfig:
    """Return the option groups about rewards, with every known option and its default. Read-only."""
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
        added_options(),
        {"reward_model": {"server": dict.fromkeys(RewardModelConfig.model_fields)}},
    )
    # All callers share the cached object.
    OmegaConf.set_readonly(merged, True)
    return merged
