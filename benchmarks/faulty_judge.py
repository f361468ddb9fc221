"""The reward function of the fault benchmark: calls the judge at ``$JUDGE_ADDRESS`` and sends its process id."""

from __future__ import annotations

import os

from reward_loop.client.http import post


async def compute_score(solution_str: str) -> float:
    """Return the judge's score of a response."""
    body = {"messages": [{"role": "user", "content": solution_str}], "pid": os.getpid()}
    async with post(os.environ["JUDGE_ADDRESS"], "/v1/chat/completions", body) as (answer, _):
        return float(answer["choices"][0]["message"]["content"])
