"""A cascade: a rule decides what it can, a small model most of the rest, and a large model what the small one cannot.

    reward-loop score examples/judges/cascade.py:Cascade rollouts.jsonl --router-address HOST:PORT \\
        --reward-kwarg large_model=gpt-5 -O limits.large.requests_per_minute=500 -O limits.large.adaptive=true
"""

from __future__ import annotations

from typing import Any

from reward_loop.client import Choice, Judge

PROMPT = """Is the final answer to the question correct? Compare it with the reference answer.

Question: {{question}}

Reference answer: {{reference}}

Answer:
{{answer}}

End with a line `Verdict: correct`, `Verdict: incorrect` or, if you cannot decide, `Verdict: unsure`."""

SURE = Choice({"correct": 1.0, "incorrect": 0.0})
UNSURE = Choice({"correct": 1.0, "incorrect": 0.0, "unsure": 0.5})


class Cascade:
    """A rule, a small judge, and a large judge; each is asked only if the one before could not decide."""

    def __init__(
        self,
        small_model: str | None = None,
        large_address: str = "https://api.openai.com/v1",
        large_model: str = "gpt-5",
        large_key_env: str = "OPENAI_API_KEY",
    ) -> None:
        """Create the judges: the small one is served in the run, the large one is a service."""
        self._small = Judge(PROMPT, UNSURE, model=small_model, max_tokens=256)
        self._large = Judge(
            PROMPT,
            SURE,
            address=large_address,
            model=large_model,
            api_key_env=large_key_env,
            limit="large",
            temperature=None,  # GPT-5 models accept no temperature of 0
        )

    async def compute_score(
        self, solution_str: str, ground_truth: str, extra_info: dict[str, Any], reward_router_address: str
    ) -> dict[str, Any]:
        """Return 1 for a correct answer and 0 for an incorrect one; `judged_by` names the part that decided."""
        lines = solution_str.strip().splitlines() or [""]
        if lines[-1].strip() == ground_truth:
            return {"score": 1.0, "judged_by": "rule"}
        fields = {"question": extra_info["question"], "reference": ground_truth, "answer": solution_str}
        judgement = await self._small(reward_router_address, **fields)
        if judgement.verdict in ("correct", "incorrect"):
            return judgement.reward(judged_by="small")
        judgement = await self._large(**fields)
        return judgement.reward(judged_by="large")
