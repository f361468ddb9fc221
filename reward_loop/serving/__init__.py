"""Reward model servers: what starts, watches and stops them, and the engines that they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward_loop.serving.manager import RewardModelManager, ServedRewardModel, serve_reward_model

__all__ = ["RewardModelManager", "ServedRewardModel", "serve_reward_model"]


def __getattr__(name: str) -> Any:
    # The embedded server's process starts sooner without the manager.
    if name in __all__:
        from reward_loop.serving import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
