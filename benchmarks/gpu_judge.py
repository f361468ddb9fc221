"""The reward function of `benchmarks.gpu` that asks two served judges with random weights."""

from __future__ import annotations

import hashlib
from typing import Any

from reward_loop.client import chat_complete

REPLY_TOKENS = 16


async def compute_score(
    solution_str: str, extra_info: dict[str, Any], reward_router_address: str
) -> dict[str, float | None]:
    """Return a number between 0 and 1 that depends on each character of the judges' replies."""
    prompt = f"Rate this answer.\nQuestion: {extra_info['question']}\nAnswer: {solution_str}\nScore:"
    replies = [
        await chat_complete(reward_router_address, prompt, model=model, max_tokens=REPLY_TOKENS, temperature=0.0)
        for model in ("first", "second")
    ]
    score = hashlib.sha256("".join(reply.text for reply in replies).encode()).digest()[0] / 255
    return {
        "score": score,
        "judge_tokens": float(sum(reply.usage.completion_tokens for reply in replies if reply.usage)),
    }
