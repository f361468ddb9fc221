"""A reward function with components: the last number of the answer, compared with the ground truth."""

from __future__ import annotations

import re


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float] | None:
    """Return 1 for the right last number, 0 for another one, and no score for an answer without a number."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    if not numbers:
        return None
    correct = float(numbers[-1]) == float(ground_truth)
    return {"score": float(correct), "words": len(solution_str.split()), "has_steps": float(len(numbers) > 1)}
