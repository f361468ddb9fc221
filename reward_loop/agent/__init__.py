"""Rewards as futures: submit a batch, continue, and take groups as their rewards complete."""

from __future__ import annotations

from reward_loop.agent.agent import BlockingPendingRewards, BlockingRewardAgent, RewardAgent
from reward_loop.agent.pending import Group, MiniBatch, PendingRewards
from reward_loop.agent.queue import Places, QueueCounts, RewardQueue, queue_metrics

__all__ = [
    "BlockingPendingRewards",
    "BlockingRewardAgent",
    "Group",
    "MiniBatch",
    "PendingRewards",
    "Places",
    "QueueCounts",
    "RewardAgent",
    "RewardQueue",
    "queue_metrics",
]
