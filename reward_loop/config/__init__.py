"""The options, each with its meaning and default. Unknown keys are errors."""

from __future__ import annotations

from reward_loop.config.options import (
    AuditConfig,
    BatchConfig,
    BudgetConfig,
    CacheConfig,
    ComponentConfig,
    GroupConfig,
    HealthConfig,
    LimitConfig,
    PolicyName,
    ProofConfig,
    RecordConfig,
    RetryConfig,
    RewardLoopConfig,
    RewardModelConfig,
    ServedModelConfig,
)
from reward_loop.config.parsing import Config, parse
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
    "PolicyName",
    "ProofConfig",
    "RecordConfig",
    "RetryConfig",
    "RewardLoopConfig",
    "RewardModelConfig",
    "ServedModelConfig",
    "parse",
]
