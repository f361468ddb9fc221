"""The manager `prime`: many worker processes, and a hard timeout for each call."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import verl_options
from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import register

__all__ = ["PrimeRewardLoopManager"]

_PROCESSES = 64
"""The number of processes that verl's ``prime`` starts."""


@register("prime")
class PrimeRewardLoopManager(NaiveRewardLoopManager):
    """Calls the function in worker processes, and kills calls past their deadline.

    By default 64 processes are divided among verl's ``reward.num_workers``; ``max_processes`` sets the number for this
    manager. A call is killed after ``timeout`` seconds (by default 300, as in verl's ``prime``).

    If the function times out or raises, verl's ``prime`` gives the sample the reward 0. Here the sample is *failed*;
    under the policy ``mask`` its reward is also 0.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            share = max(1, _PROCESSES // (verl_options(config, "reward.num_workers") or 1))
            self.function.isolate(self.options.max_processes or share, self.options.max_memory_mb)
