"""The manager of PRIME: many processes, and a hard limit on the time of each call."""

from __future__ import annotations

from typing import Any

from reward_loop.managers.base import verl_options
from reward_loop.managers.naive import NaiveRewardLoopManager
from reward_loop.managers.registry import register

__all__ = ["PrimeRewardLoopManager"]

_PROCESSES = 64
"""As many as verl's ``prime`` starts."""


@register("prime")
class PrimeRewardLoopManager(NaiveRewardLoopManager):
    """Calls the function in processes, 64 at a time in the whole job unless ``max_processes`` says how many here.

    A call past ``timeout``, 300 seconds as in verl's ``prime`` unless configured, is killed. There such a sample, and
    one whose function raises, has the reward 0; here it *failed*, with reward 0 under the policy ``mask`` as well.
    """

    def __init__(self, config: Any = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.function is not None:
            share = max(1, _PROCESSES // (verl_options(config, "reward.num_workers") or 1))
            self.function.isolate(self.options.max_processes or share, self.options.max_memory_mb)
