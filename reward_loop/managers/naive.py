"""The manager for most uses: one call of the function a sample."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import RewardLoopManagerBase
from reward_loop.managers.registry import register
from reward_loop.types import Reward

__all__ = ["NaiveRewardLoopManager"]


@register("naive")
class NaiveRewardLoopManager(RewardLoopManagerBase):
    """Calls the function once for each sample."""

    async def run_single(self, data: Any) -> Reward:
        """Return the reward of one sample."""
        sample = await self.to_sample(data)
        return self.to_reward(await self.score(sample))
