"""A rubric: one request for each criterion; each criterion is a component of the manager `composite`, with a weight.

    reward-loop score rollouts.jsonl --manager composite --router-address HOST:PORT \\
        -O components.correct.path=examples/judges/rubric.py:Criterion -O components.correct.weight=0.7 \\
        -O components.correct.reward_kwargs.criterion="The result is correct." \\
        -O components.clear.path=examples/judges/rubric.py:Criterion -O components.clear.weight=0.3 \\
        -O components.clear.reward_kwargs.criterion="Each step follows from the one before."

The criterion comes last in the prompt: a server that keeps a prefix cache then reads question and answer only once.
"""

from __future__ import annotations

from typing import Any

from reward_loop.client import Judge, Number

PROMPT = """How well does the answer to the question meet the criterion below it?

Question: {{question}}

Answer:
{{answer}}

Criterion: {{criterion}}

Consider only this criterion. Explain your rating in one sentence, then end with a line `Score: N`, from 1 (not at \
all) to 10 (fully)."""


class Criterion:
    """One criterion of a rubric; its score is from 0 to 1."""

    def __init__(self, criterion: str, model: str | None = None) -> None:
        """Take the criterion in words, and the name of the judge's model, if the address serves several."""
        self._criterion = criterion
        self._judge = Judge(PROMPT, Number(1, 10, scaled=True), model=model, max_tokens=256)

    async def compute_score(
        self, solution_str: str, extra_info: dict[str, Any], reward_router_address: str
    ) -> dict[str, Any]:
        """Ask how well the answer meets the criterion; without a rating, the component is unscored."""
        judgement = await self._judge(
            reward_router_address, criterion=self._criterion, question=extra_info["question"], answer=solution_str
        )
        return judgement.reward()
