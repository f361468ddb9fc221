"""The options, each with its meaning and default. Unknown keys are errors."""

from __future__ import annotations

from reward_loop.config.calls import BudgetConfig, CacheConfig, LimitConfig, RetryConfig
from reward_loop.config.monitoring import AuditConfig, HealthConfig, RecordConfig
from reward_loop.config.parsing import Config, parse
from reward_loop.config.reward_model import RewardModelConfig, ServedModelConfig
from reward_loop.config.rewards import BatchConfig, ComponentConfig, GroupConfig, RewardLoopConfig
from reward_loop.types import Policy

__all__ = [
    "AuditConfig",
    "BatchConfig",
    "BudgetConfig",
    "CacheConfig",
    "ComponentConfig",
    "Config",
    "GroupConfig",
    "HealthConfig",
    "LimitConfig",
    "Policy",
    "RecordConfig",
    "RetryConfig",
    "RewardLoopConfig",
    "RewardModelConfig",
    "ServedModelConfig",
    "parse",
]
