"""Rewards whose parts belong to tokens or turns: checked before they reach a trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from reward_loop._text import shorten
from reward_loop.errors import InvalidScoreError
from reward_loop.scoring.call import describe, failed_after
from reward_loop.types import PART_KEYS, RewardResult, RewardSample

__all__ = ["check_parts"]


def check_parts(sample: RewardSample, result: RewardResult) -> RewardResult:
    """Return the result, or a failed one where its parts are no finite numbers, or not one for each token.

    How many turns a response has is known to the trainer alone, which checks the others.
    """
    if PART_KEYS.isdisjoint(result.extra_info):
        return result
    for name in PART_KEYS & result.extra_info.keys():
        parts = result.extra_info[name]
        if not _are_numbers(parts):
            problem = f"{name} must be a list of finite numbers; got {shorten(parts)}"
        elif name == "token_level_scores" and sample.response_length not in (None, len(parts)):
            problem = f"{len(parts)} {name}, and the response has {sample.response_length} tokens"
        else:
            continue
        return failed_after(result, InvalidScoreError(f"{describe(sample)}: {problem}"))
    return result


def _are_numbers(parts: Any) -> bool:
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        return False
    return all(isinstance(part, Real) and math.isfinite(part) for part in parts)
