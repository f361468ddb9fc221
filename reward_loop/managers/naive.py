"""The manager `naive`, for most uses: one call of the function per sample."""

from __future__ import annotations

from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.registry import register

__all__ = ["NaiveRewardLoopManager"]


@register("naive")
class NaiveRewardLoopManager(RewardLoopManagerBase):
    """Calls the function once for each sample."""
