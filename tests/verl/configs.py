"""verl's configuration, composed as verl's command does it where the reward loop is on."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

from hydra import compose, initialize
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from examples import verl_cpu
from reward_loop.verl.installed import verl_config_dir
from reward_loop.verl.options import CONFIG_DIR, RewardSettings, resolve

ROLLOUT_ELSEWHERE = (
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)
"""What the mode ``separate_async`` needs."""


def configuration(*overrides: str, name: str = "ppo_trainer", folder: Path | None = None) -> DictConfig:
    """Composes a configuration. Overrides that choose another file of verl have no effect.

    ``folder`` is that of a file of the user's own.
    Records are off unless the overrides choose their folder: tests would write into the working directory.
    """
    has_folder = any("log_dir" in override or "default_local_dir" in override for override in overrides)
    records = [] if has_folder else ["reward_loop.log_dir=null"]
    config = copy.deepcopy(_composed(name, folder))
    # As Hydra does it, without composing its own options again, which takes most of the time.
    parsed = OverridesParser.create().parse_overrides([*records, *overrides])
    ConfigLoaderImpl._apply_overrides_to_config([one for one in parsed if not one.is_hydra_override()], config)
    return config


@functools.cache
def _composed(name: str, folder: Path | None) -> DictConfig:
    ConfigStore.instance().store(name=f"primary_{name}", node={"defaults": [name]})
    # `known` comes first, as the plug-in of Hydra has it.
    folders = (CONFIG_DIR / "known", verl_config_dir(), CONFIG_DIR, CONFIG_DIR.parent, verl_config_dir().parent)
    folders = (*folders, *([folder] if folder else []), *([verl_cpu.HERE] if name == "cpu" else []))
    searchpath = f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"
    with initialize(config_path=None, version_base=None):
        return compose(f"primary_{name}", [searchpath])


def resolved(*overrides: str, name: str = "ppo_trainer", folder: Path | None = None) -> RewardSettings:
    return resolve(configuration(*overrides, name=name, folder=folder))


def settled(*overrides: str, name: str = "ppo_trainer") -> DictConfig:
    """The whole configuration, with old keys moved to their successors."""
    return resolved(*overrides, name=name).config


def pipeline(*overrides: str, **options: object) -> DictConfig:
    """The whole configuration of the mode ``reward_pipeline`` with GRPO and these ``options`` of the mode."""
    of_mode = (f"trainer.v1.reward_pipeline.{name}={value}" for name, value in options.items())
    return settled("trainer.v1.trainer_mode=reward_pipeline", "algorithm.adv_estimator=grpo", *of_mode, *overrides)
