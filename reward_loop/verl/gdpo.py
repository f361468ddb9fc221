"""GDPO in verl's V1 trainer, which passes only the sum of a sample's rewards to advantage estimators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage, register_adv_est

from reward_loop.errors import ConfigError
from reward_loop.types import finite_number
from reward_loop.verl.compat import uses
from reward_loop.verl.reward_metrics import Rewards

uses(
    __name__,
    "verl.trainer.ppo.core_algos",
    "register_adv_est(name_or_enum)",
    "compute_gdpo_outcome_advantage(token_level_rewards, response_mask, index, config, non_tensor_batch, batch)",
)

GDPO = "reward_loop_gdpo"
"""The name of verl's estimator ``gdpo`` with the rewards from `use_rewards`."""

_MAX = float(np.finfo(np.float32).max)

_rewards: ContextVar[Mapping[str, np.ndarray]] = ContextVar("gdpo_rewards")


def switch_estimator(config: DictConfig) -> None:
    """Replace ``algorithm.adv_estimator=gdpo`` by `GDPO`, in place. Other estimators stay unchanged."""
    if config.algorithm.adv_estimator == "gdpo":
        with open_dict(config):
            config.algorithm.adv_estimator = GDPO


def component_rewards(
    keys: Sequence[str], rewards: Rewards, names: Sequence[str], default_score: float
) -> dict[str, np.ndarray]:
    """Return each named reward as a float32 array with one number per row of a batch.

    Args:
        keys: the keys of the batch's rows.
        rewards: the rewards by key, without padding rows. Padding rows and masked rows get 0, which has no effect
            because their tokens are masked.
        names: the value of ``algorithm.gdpo_reward_keys``.
        default_score: each reward of an unmasked sample without a score. Not all such samples come from the manager
            `gdpo`, which sets it: for example, a sample whose reward worker died repeatedly.

    Raises:
        ConfigError: a scored sample lacks one of the rewards, or it is not a finite number.
    """
    columns: dict[str, list[float]] = {name: [] for name in names}
    for key in keys:
        reward = rewards.get(key)
        for name, column in columns.items():
            if reward is None or reward.is_masked:
                column.append(0.0)
            elif not reward.is_scored:
                column.append(default_score)
            elif (number := finite_number(reward.info.get(name))) is None or abs(number) > _MAX:
                raise ConfigError(
                    f"algorithm.gdpo_reward_keys names {name!r}, for which rollout {key} has no finite number: the "
                    "function must return one for every sample. reward_model.reward_manager=gdpo checks this when the "
                    "function returns"
                )
            else:
                column.append(number)
    return {name: np.asarray(column, dtype=np.float32) for name, column in columns.items()}


@contextmanager
def use_rewards(rewards: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Provide these rewards, in the order of the batch's rows, to the estimator `GDPO` within the block."""
    token = _rewards.set(rewards)
    try:
        yield
    finally:
        _rewards.reset(token)


@register_adv_est(GDPO)
def _advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # verl writes each reward to the last token, and then sums over tokens, so the position does not matter.
    batch = {"prompts": response_mask[:, :0], "attention_mask": torch.ones_like(response_mask, dtype=torch.long)}
    return compute_gdpo_outcome_advantage(
        token_level_rewards, response_mask, index, config=config, non_tensor_batch=dict(_rewards.get()), batch=batch
    )
