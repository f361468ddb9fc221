"""The router: one address in front of the servers of a reward model."""

from __future__ import annotations

import importlib
from typing import Any

_MOVED = ("RewardModelManager", "ServedRewardModel", "serve_reward_model")


def __getattr__(name: str) -> Any:
    """Returns a name that moved to :mod:`reward_loop.serving`, imported on first use."""
    if name in _MOVED:
        return getattr(importlib.import_module("reward_loop.serving"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
