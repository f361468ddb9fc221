"""A judge that compares the final answer with the reference: for answers that have many correct spellings.

reward-loop score examples/judges/equality.py:compute_score rollouts.jsonl --router-address HOST:PORT
"""

from __future__ import annotations

from typing import Any

from reward_loop.client import Choice, Judge

judge = Judge(
    """Do these two answers to the question mean the same? Ignore spelling, notation and units that the question \
implies. Do not solve the question: the reference is correct.

Question: {{question}}

Reference answer: {{reference}}

Other answer:
{{answer}}

End with a line `Verdict: same` or `Verdict: different`.""",
    Choice({"same": 1.0, "different": 0.0}),
    max_tokens=256,
)

LONGEST = 2000
"""Characters at the end of a response that the judge reads: the final answer is there."""


async def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any], reward_router_address: str
) -> dict[str, Any]:
    """Return 1 for an answer with the meaning of the reference, otherwise 0; without a verdict, it is unscored."""
    judgement = await judge(
        reward_router_address,
        question=extra_info["question"],
        reference=ground_truth,
        answer=solution_str[-LONGEST:],
    )
    return judgement.reward(acc=judgement.score)
