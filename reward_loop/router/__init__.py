"""A reward model at one address: its servers, and the router in front of them."""

from reward_loop.router.manager import RewardModelManager, serve_reward_model

__all__ = ["RewardModelManager", "serve_reward_model"]
