"""Rewards for TRL's trainers, and a `GRPOTrainer` that hides judging behind training.

`reward_function` needs no package of TRL's. `OverlappedGRPOTrainer` imports TRL and greenlet on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reward_loop.adapters.trl.reward import TRLReward, reward_function

if TYPE_CHECKING:
    from reward_loop.adapters.trl.overlapped import OverlappedGRPOTrainer

__all__ = ["OverlappedGRPOTrainer", "TRLReward", "reward_function"]


def __getattr__(name: str) -> Any:
    if name == "OverlappedGRPOTrainer":
        from reward_loop.adapters.trl.overlapped import OverlappedGRPOTrainer

        return OverlappedGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
