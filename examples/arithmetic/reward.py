"""The reward: a reward model's verdict over HTTP, mixed with a rule about the form of the answer."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from reward_loop.client import classify

FORMAT_WEIGHT = 0.1
"""The share of the score that the form of an answer decides; the rest is the reward model's."""


async def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    latency_s: float = 0.0,
) -> dict[str, float]:
    """How likely the answer is right, in the reward model's view, and whether it consists of digits alone.

    The reward model is small and quick. `latency_s` makes it as slow as a large one: in training, a verdict takes that
    many seconds longer on average, drawn at random between half of it and one and a half times.

    `acc` says whether the answer is the reference's. It is for information: the score does not depend on it. verl makes
    it the headline of a validation.
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
    right = _sigmoid(logit)
    well_formed = float(solution_str.isascii() and solution_str.isdigit())
    return {
        "score": (1 - FORMAT_WEIGHT) * right + FORMAT_WEIGHT * well_formed,
        "reward_model": right,
        "format": well_formed,
        "acc": float(solution_str == ground_truth),
    }


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
