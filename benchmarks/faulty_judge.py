"""The reward function of the run with faults: it asks the judge at ``$JUDGE_ADDRESS`` by HTTP, and says who asks."""

from __future__ import annotations

import os

from reward_loop.client.http import post


async def compute_score(solution_str: str) -> float:
    """Return what the judge says of a response."""
    body = {"messages": [{"role": "user", "content": solution_str}], "pid": os.getpid()}
    answer = await post(os.environ["JUDGE_ADDRESS"], "/v1/chat/completions", body)
    return float(answer["choices"][0]["message"]["content"])
