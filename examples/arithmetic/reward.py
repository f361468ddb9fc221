"""The reward: a weighted sum of a reward model's score, requested over HTTP, and a rule about the answer's format."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from reward_loop.client import classify

FORMAT_WEIGHT = 0.1
"""Weight of the format rule in the score; the reward model has the rest."""


async def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    latency_s: float = 0.0,
) -> dict[str, float]:
    """Return the score of an answer: the reward model's probability that it is right, and whether it is all digits.

    The small reward model is fast. `latency_s` simulates a slow one: in training, each call takes that many additional
    seconds on average, drawn uniformly between 0.5 and 1.5 times `latency_s`.

    `acc` is 1 if the answer equals the reference answer. The score does not depend on it; verl reports it as the main
    metric of a validation.
    """
    conversation = [
        {"role": "user", "content": extra_info["question"]},
        {"role": "assistant", "content": solution_str},
    ]
    if latency_s and extra_info["split"] == "train":
        await asyncio.sleep(random.uniform(0.5, 1.5) * latency_s)
    logit = await classify(
        reward_router_address, reward_model_tokenizer.apply_chat_template(conversation, tokenize=False)
    )
    return {**weighted(logit, solution_str), "acc": float(solution_str == ground_truth)}


def weighted(logit: float, solution_str: str) -> dict[str, float]:
    """Return the score for a logit of the reward model, and its two components."""
    right = _sigmoid(logit)
    well_formed = float(solution_str.isascii() and solution_str.isdigit())
    return {
        "score": (1 - FORMAT_WEIGHT) * right + FORMAT_WEIGHT * well_formed,
        "reward_model": right,
        "format": well_formed,
    }


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
