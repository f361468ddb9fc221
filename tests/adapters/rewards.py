"""A reward function and the options for it, for the tests of the adapters."""

from __future__ import annotations

import asyncio
import os
from typing import Any

FUNCTION = f"{__file__}:compute_score"


async def compute_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any] | None:
    """1 for the ground truth, otherwise 0; `none` has no score, `fail` raises, `hang` waits."""
    if solution_str == "none":
        return None
    if solution_str == "fail":
        raise ValueError("the judge is broken")
    if solution_str == "hang":
        await asyncio.sleep(3600)
    score = float(solution_str == ground_truth)
    return {"score": score, "words": len(solution_str.split()), "level": extra_info.get("level", "?")}


def rank(solution_strs: list[str]) -> list[float]:
    """The rank of each response by length, from 0 to 1, as a batched function of a group."""
    ordered = sorted(solution_strs, key=len)
    return [ordered.index(text) / max(1, len(ordered) - 1) for text in solution_strs]


def exits(solution_str: str) -> float:
    """End the process in which it runs, if that is a worker process."""
    if solution_str == "crash":
        os._exit(3)
    return 1.0


def columns_of(extra_info: dict[str, Any], data_source: str) -> float:
    """1 for the data source `sums`; fails if `extra_info` has other columns than expected."""
    assert sorted(extra_info) == ["data_source", "finish_reason", "solution"]
    return float(data_source == "sums")


class VerlManager:
    """A reward manager with verl's contract only."""

    def __init__(self, compute_score: Any, **_: Any) -> None:
        pass

    async def run_single(self, data: Any) -> dict[str, Any]:
        return {"reward_score": float(len(data.solution_str)), "reward_extra_info": {"length": 1}}


class Centred:
    """The length of a response, minus the mean of its group."""

    def compute_score(self, solution_str: str) -> float:
        return float(len(solution_str))

    def post_process_scores(self, scores: list[float]) -> list[float]:
        return [score - sum(scores) / len(scores) for score in scores]


def asked(prompt: str, response_ids: list[int], is_truncated: bool, validate: bool | None = None) -> dict[str, float]:
    """Take what slime passes; it does not pass whether it evaluates."""
    assert (prompt, validate) == ("2+2=", None)
    return {"score": 1.0, "tokens": len(response_ids), "cut": float(is_truncated)}


def scheduled(global_steps: int) -> float:
    """Take the training step."""
    return float(global_steps)
