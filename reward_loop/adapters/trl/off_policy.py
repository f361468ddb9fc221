"""The settings of training on samples that are one step old: defaults, and what cannot work."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from reward_loop.errors import ConfigError

__all__ = ["EPSILON_HIGH", "check_trainer", "with_defaults"]

EPSILON_HIGH = 0.4
"""The default of ``epsilon_high``. Between two updates, 3 to 5 % of the ratios exceed TRL's clip range of 0.2, and the
policy learns more slowly."""

_NOT_CLIPPED = ("cispo", "sapo", "vespo")
"""Values of ``loss_type`` without the clip range of GRPO."""


def with_defaults(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """Return the options of the trainer with ``epsilon_high`` set, unless the loss has no clip range.

    Args:
        args: the user's options, which are not changed; ``None`` for those of TRL.
        model: the model or its name, which names TRL's output folder.
    """
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = GRPOConfig(f"{Path(name).name}-GRPO")
    if args.epsilon_high is not None or args.loss_type in _NOT_CLIPPED:
        return args
    args = copy.copy(args)
    args.epsilon_high = EPSILON_HIGH
    return args


def check_trainer(trainer: Any, async_functions: Mapping[int, Any]) -> None:
    """Check that a `GRPOTrainer` with these async reward functions can be overlapped.

    Raises:
        ConfigError: an option cannot work.
    """
    if not async_functions:
        raise ConfigError(
            "OverlappedGRPOTrainer hides the time of async reward functions, and reward_funcs has none: wrap a "
            "function with reward_loop.adapters.trl.reward_function, or use GRPOTrainer"
        )
    if trainer.environment_factories is not None:
        raise ConfigError(
            "OverlappedGRPOTrainer does not support environment_factory: TRL resets the environments for the next "
            "generation before the rewards of this one are computed. Use GRPOTrainer"
        )
