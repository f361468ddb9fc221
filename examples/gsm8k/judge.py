"""A reward function for GSM8K that asks a served judge model whether a solution is correct.

With verl, see `examples/genrm_1x8.sh`. To try it on stored solutions with any OpenAI-compatible service:

    reward-loop score examples/gsm8k/judge.py:compute_score rollouts.jsonl --router-address HOST:PORT
"""

from reward_loop.client import Choice, Judge

judge = Judge(
    """Is the student's final answer to this problem correct? Compare it with the reference answer. Check the steps, \
too: a correct number after wrong steps is incorrect. End with a line `Verdict: correct` or `Verdict: incorrect`.

Problem: {{question}}

Reference answer: {{reference}}

The student's solution:
{{solution}}""",
    Choice({"correct": 1.0, "incorrect": 0.0}),
    max_tokens=1024,
)


async def compute_score(solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str) -> dict:
    """Return 1 for a correct solution, 0 for an incorrect one; without a verdict, the sample is unscored."""
    judgement = await judge(
        reward_router_address, question=extra_info["question"], reference=ground_truth, solution=solution_str
    )
    return judgement.reward(acc=judgement.score)
