"""Starts, supervises and stops reward model servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reward_loop.serving.manager import RewardModelManager, serve_reward_model

__all__ = ["RewardModelManager", "serve_reward_model"]


def __getattr__(name: str) -> Any:
    # Imported on demand: the process of the embedded server does not need the manager.
    if name in __all__:
        from reward_loop.serving import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
