"""Load and call the user's reward function, and normalise its return value."""

from __future__ import annotations

from reward_loop.limits.call import limit
from reward_loop.scoring.combine import combine
from reward_loop.scoring.functions import ListScoringFunction, ScoringFunction
from reward_loop.scoring.load import load_function, load_object
from reward_loop.scoring.results import normalise
from reward_loop.scoring.signature import isolated

__all__ = [
    "ListScoringFunction",
    "ScoringFunction",
    "combine",
    "isolated",
    "limit",
    "load_function",
    "load_object",
    "normalise",
]
