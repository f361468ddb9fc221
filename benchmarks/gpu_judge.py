"""The reward function of `benchmarks.gpu` that asks a served judge with random weights."""

from __future__ import annotations

import hashlib
from typing import Any

from reward_loop.client import chat_complete

REPLY_TOKENS = 16


async def compute_score(
    solution_str: str, extra_info: dict[str, Any], reward_router_address: str
) -> dict[str, float | None]:
    """Return a number between 0 and 1 that depends on each character of the judge's reply."""
    prompt = f"Rate this answer.\nQuestion: {extra_info['question']}\nAnswer: {solution_str}\nScore:"
    reply = await chat_complete(reward_router_address, prompt, max_tokens=REPLY_TOKENS, temperature=0.0)
    return {
        "score": hashlib.sha256(reply.text.encode()).digest()[0] / 255,
        "judge_tokens": float(reply.usage.completion_tokens) if reply.usage else None,
    }
