"""The manager `remote`, for CPU-bound functions: one call of the function per sample, in worker processes."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import verl_options
from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import register

__all__ = ["RemoteRewardLoopManager"]


@register("remote")
class RemoteRewardLoopManager(NaiveRewardLoopManager):
    """Calls a sync function in worker processes, which are killed at the deadline. ``isolation`` is ignored.

    The number of processes is ``max_processes``, by default verl's ``reward.num_workers``. verl's manager of the same
    name uses Ray actors without a deadline instead.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            processes = self.options.max_processes or verl_options(config, "reward.num_workers")
            self.function.isolate(processes, self.options.max_memory_mb)
