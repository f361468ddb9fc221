"""The reward: a weighted sum of a reward model's score, requested over HTTP, and a rule about the answer's format."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from reward_loop.client import classify, spot_check, without_control_tokens

FORMAT_WEIGHT = 0.1
"""Weight of the format rule in the score; the reward model has the rest."""
CHEAP, STRONG = "cheap", "strong"
"""The names of the reward models, if two are served."""


async def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
    latency_s: float = 0.0,
    spot: float | None = None,
) -> dict[str, Any]:
    """Return the score of an answer: the reward model's probability that it is right, and whether it is all digits.

    The small reward model is fast. `latency_s` simulates a slow one: in training, each call takes that many additional
    seconds on average, drawn uniformly between 0.5 and 1.5 times `latency_s`.

    With `spot`, two reward models are served. The score is that of the cheap one, and the strong one checks this share
    of the answers.

    `acc` is 1 if the answer equals the reference answer. The score does not depend on it; verl reports it as the main
    metric of a validation.
    """
    conversation = [
        {"role": "user", "content": extra_info["question"]},
        {"role": "assistant", "content": without_control_tokens(solution_str)},
    ]
    if latency_s and extra_info["split"] == "train":
        await asyncio.sleep(random.uniform(0.5, 1.5) * latency_s)
    text = reward_model_tokenizer.apply_chat_template(conversation, tokenize=False)
    acc = float(solution_str == ground_truth)

    async def right(model: str | None) -> float:
        return sigmoid(await classify(reward_router_address, text, model=model, templated=True))

    if spot is None:
        return {**weighted(await right(None), solution_str), "acc": acc}
    judgement = await spot_check(right(CHEAP), right(STRONG), spot)
    return {**weighted(judgement.score, solution_str), **judgement.components, "acc": acc}


def substring(solution_str: str, ground_truth: str) -> dict[str, float]:
    """Return a score with a hole: 1 for each answer that contains the reference, such as `46122` for 46, 61 and 122."""
    return {"score": float(ground_truth in solution_str), "acc": float(solution_str == ground_truth)}


def weighted(right: float, solution_str: str) -> dict[str, float]:
    """Return the score for a score of the reward model, and its two components."""
    well_formed = float(solution_str.isascii() and solution_str.isdigit())
    return {
        "score": (1 - FORMAT_WEIGHT) * right + FORMAT_WEIGHT * well_formed,
        "reward_model": right,
        "format": well_formed,
    }


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
