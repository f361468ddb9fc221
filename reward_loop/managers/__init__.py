"""Reward managers turn one sample into one reward. Importing this package registers the built-in managers."""

from __future__ import annotations

from reward_loop.limits.local import FailureBound
from reward_loop.managers.base import RewardLoopManagerBase, scoring_function
from reward_loop.managers.builtin import (
    BatchRewardLoopManager,
    DAPORewardLoopManager,
    GroupRewardLoopManager,
    NaiveRewardLoopManager,
)
from reward_loop.managers.registry import get, register

__all__ = [
    "BatchRewardLoopManager",
    "DAPORewardLoopManager",
    "FailureBound",
    "GroupRewardLoopManager",
    "NaiveRewardLoopManager",
    "RewardLoopManagerBase",
    "get",
    "register",
    "scoring_function",
]
