"""Monitors of the rewards of each training step, which warn of reward hacking and broken judges; see docs/health.md."""

from __future__ import annotations

from reward_loop.health.effect import Effect, Verdict, effect_of
from reward_loop.health.values import JudgeCalls, Observation, ProbeCounts
from reward_loop.health.watch import Findings, HealthWarning, HealthWatch

__all__ = [
    "Effect",
    "Findings",
    "HealthWarning",
    "HealthWatch",
    "JudgeCalls",
    "Observation",
    "ProbeCounts",
    "Verdict",
    "effect_of",
]
