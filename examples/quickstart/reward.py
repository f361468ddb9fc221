"""A reward function with components: the number on the last line, `Answer: 36`, compared with the ground truth."""

from __future__ import annotations

import re
from fractions import Fraction

ANSWER = re.compile(r"^Answer: *(-?[\d,]*\.?\d+(?:/[1-9]\d*)?)\.?\s*\Z", re.MULTILINE)


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float] | None:
    """Return 1 for the right answer, 0 for another one, and no score for a response without an answer line."""
    found = ANSWER.search(solution_str)
    if found is None:
        return None
    correct = number(found[1]) == number(ground_truth)
    return {"score": float(correct), "words": len(solution_str.split()), "has_steps": float("=" in solution_str)}


def number(text: str) -> Fraction:
    """Return the value of `36`, `1,000`, `0.5` or `1/2`."""
    return Fraction(text.replace(",", ""))
