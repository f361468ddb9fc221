"""Reward managers: how one sample becomes one reward. Importing this registers those that come with the library."""

from __future__ import annotations

from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import get, register
from reward_loop.scoring.failures import FailureBound

__all__ = ["FailureBound", "NaiveRewardLoopManager", "RewardLoopManagerBase", "get", "register"]
