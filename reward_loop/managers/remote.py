"""The manager for checkers that need the CPU: one call of the function a sample, in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import register

__all__ = ["RemoteRewardLoopManager", "reward_workers"]


@register("remote")
class RemoteRewardLoopManager(NaiveRewardLoopManager):
    """Calls the function in processes, which can be killed, whatever ``isolation`` says. It must be sync.

    There are ``max_processes``, by default verl's ``reward.num_workers`` as in verl's manager of this name, where they
    are Ray actors without a deadline.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            processes = self.options.max_processes or reward_workers(config)
            self.function.isolate(processes, self.options.max_memory_mb)


def reward_workers(config: Any) -> int | None:
    """Return verl's ``reward.num_workers``, where ``config`` is verl's whole configuration."""
    reward = config.get("reward") if isinstance(config, Mapping) else None
    return reward.get("num_workers") if isinstance(reward, Mapping) else None
