"""The manager for checkers that need the CPU: one call of the function a sample, in processes of its own."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import verl_options
from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import register

__all__ = ["RemoteRewardLoopManager"]


@register("remote")
class RemoteRewardLoopManager(NaiveRewardLoopManager):
    """Calls the function in processes, which can be killed, whatever ``isolation`` says. It must be sync.

    There are ``max_processes``, by default verl's ``reward.num_workers`` as in verl's manager of this name, where they
    are Ray actors without a deadline.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            processes = self.options.max_processes or verl_options(config, "reward.num_workers")
            self.function.isolate(processes, self.options.max_memory_mb)
