"""Rewards that never block RL training of language models.

The names in ``__all__`` are public. Those of sub-packages are imported on first use: `import reward_loop` is fast and
does not import torch, Ray, transformers or verl.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from reward_loop.errors import (
    BudgetSpentError,
    ConfigError,
    FunctionLoadError,
    IncompleteGroupError,
    InvalidScoreError,
    JobServiceError,
    LimitError,
    QueueClosedError,
    RequestError,
    RewardCrashedError,
    RewardFunctionError,
    RewardLoopError,
    RewardsCancelledError,
    RewardTimeoutError,
    ScoringError,
    ServerDiedError,
    ServerError,
    ServerStartError,
    TooManyFailuresError,
    TransientError,
    UnscoredError,
)
from reward_loop.types import ComputeScore, Outcome, Reward, RewardResult, RewardSample

if TYPE_CHECKING:
    from reward_loop.agent import BlockingRewardAgent, RewardAgent
    from reward_loop.config import RewardLoopConfig
    from reward_loop.managers import NaiveRewardLoopManager, RewardLoopManagerBase, register
    from reward_loop.scoring import ScoringFunction, isolated, limit, load_function
    from reward_loop.serving import RewardModelManager

__version__ = "0.1.0"

__all__ = [
    "BlockingRewardAgent",
    "BudgetSpentError",
    "ComputeScore",
    "ConfigError",
    "FunctionLoadError",
    "IncompleteGroupError",
    "InvalidScoreError",
    "JobServiceError",
    "LimitError",
    "NaiveRewardLoopManager",
    "Outcome",
    "QueueClosedError",
    "RequestError",
    "Reward",
    "RewardAgent",
    "RewardCrashedError",
    "RewardFunctionError",
    "RewardLoopConfig",
    "RewardLoopError",
    "RewardLoopManagerBase",
    "RewardModelManager",
    "RewardResult",
    "RewardSample",
    "RewardTimeoutError",
    "RewardsCancelledError",
    "ScoringError",
    "ScoringFunction",
    "ServerDiedError",
    "ServerError",
    "ServerStartError",
    "TooManyFailuresError",
    "TransientError",
    "UnscoredError",
    "__version__",
    "isolated",
    "limit",
    "load_function",
    "register",
]

_LAZY = {
    "BlockingRewardAgent": "reward_loop.agent",
    "NaiveRewardLoopManager": "reward_loop.managers",
    "RewardAgent": "reward_loop.agent",
    "RewardLoopConfig": "reward_loop.config",
    "RewardLoopManagerBase": "reward_loop.managers",
    "RewardModelManager": "reward_loop.serving",
    "ScoringFunction": "reward_loop.scoring",
    "isolated": "reward_loop.scoring",
    "limit": "reward_loop.scoring",
    "load_function": "reward_loop.scoring",
    "register": "reward_loop.managers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
