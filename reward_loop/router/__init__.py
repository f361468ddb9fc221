"""A reward model at one address: its servers, and the router in front of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward_loop.router.manager import RewardModelManager, ServedRewardModel, serve_reward_model

__all__ = ["RewardModelManager", "ServedRewardModel", "serve_reward_model"]


def __getattr__(name: str) -> Any:
    # The router's own process is up sooner without the manager.
    if name in __all__:
        from reward_loop.router import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
