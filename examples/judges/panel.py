"""A panel: several models judge each answer; the score is the mean of their verdicts.

    reward-loop score examples/judges/panel.py:Panel rollouts.jsonl --router-address HOST:PORT \\
        --reward-kwarg 'models=["qwen", "llama", "mistral"]'

A model that fails, or gives no verdict, is left out if more than half of the panel has a verdict.
"""

from __future__ import annotations

import asyncio
from statistics import fmean, pstdev
from typing import Any

from reward_loop.client import Judge, Judgement, Number

PROMPT = """How helpful is the answer to the question?

Question: {{question}}

Answer:
{{answer}}

Explain your rating in two sentences, then end with a line `Score: N`, from 1 (useless) to 10 (perfect)."""


class Panel:
    """Several models behind one address; all are asked at the same time."""

    def __init__(self, models: list[str], limit: str = "judge") -> None:
        """Create a judge for each model; their requests share one limit."""
        verdict = Number(1, 10, scaled=True)
        self._judges = {model: Judge(PROMPT, verdict, model=model, limit=limit, max_tokens=256) for model in models}

    async def compute_score(
        self, solution_str: str, extra_info: dict[str, Any], reward_router_address: str
    ) -> dict[str, Any] | None:
        """Return the mean of the verdicts, each verdict, and their standard deviation as `disagreement`."""
        fields = {"question": extra_info["question"], "answer": solution_str}
        # With return_exceptions, all requests have ended when a failure is raised; none is left running.
        answers = await asyncio.gather(
            *(judge(reward_router_address, **fields) for judge in self._judges.values()), return_exceptions=True
        )
        scores: dict[str, float] = {}
        for model, answer in zip(self._judges, answers, strict=True):
            if isinstance(answer, Judgement) and answer.score is not None:
                scores[model] = answer.score
        if 2 * len(scores) <= len(self._judges):
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            if failures:
                raise failures[0]  # a transient one is tried again
            return None
        return {"score": fmean(scores.values()), "disagreement": pstdev(scores.values()), **scores}
