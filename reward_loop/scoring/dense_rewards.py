"""What is checked before a reward reaches a trainer: that it is finite, and so are its parts for tokens or turns."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from reward_loop._util.text import shorten
from reward_loop.errors import InvalidScoreError
from reward_loop.scoring.call import describe, failed_after
from reward_loop.scoring.normalise import is_finite
from reward_loop.types import PART_KEYS, RewardResult, RewardSample

__all__ = ["are_numbers", "check_parts"]


def check_parts(sample: RewardSample, result: RewardResult) -> RewardResult:
    """Return the result, or a failed one where score or parts are no finite numbers, or parts not one for each token.

    A manager may have made a score of several, each of them finite. How many turns a response has is known to the
    trainer alone, which checks that.
    """
    if result.score is not None and not is_finite(result.score):
        problem = f"its score is {result.score:g}, which is not finite in float32"
        return failed_after(result, InvalidScoreError(f"{describe(sample)}: {problem}"))
    if PART_KEYS.isdisjoint(result.extra_info):
        return result
    for name in PART_KEYS & result.extra_info.keys():
        parts = result.extra_info[name]
        if not are_numbers(parts):
            problem = f"{name} must be a list of finite numbers; got {shorten(parts)}"
        elif name == "token_level_scores" and sample.response_length not in (None, len(parts)):
            problem = f"{len(parts)} {name}, and the response has {sample.response_length} tokens"
        else:
            continue
        return failed_after(result, InvalidScoreError(f"{describe(sample)}: {problem}"))
    return result


def are_numbers(parts: Any) -> bool:
    """Return whether the parts of a reward are a list of finite numbers."""
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence):
        return False
    return all(isinstance(part, Real) and is_finite(part) for part in parts)
