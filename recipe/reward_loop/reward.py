"""Rewards for GSM8K from a judge on an API: a sample that it does not judge is masked, never 0."""

from reward_loop.client import Choice, Judge

judge = Judge(
    """Is the student's final answer correct? Compare it with the reference answer. End with \
<verdict>correct</verdict> or <verdict>incorrect</verdict>.

Problem: {{question}}

Reference answer: {{reference}}

The student's solution:
{{solution}}""",
    Choice({"correct": 1.0, "incorrect": 0.0}, after="<verdict>"),
    fence=["solution"],
    address="https://api.openai.com/v1",
    model="gpt-5-mini",
    api_key_env="OPENAI_API_KEY",
    temperature=None,
    limit="judge",
)


async def compute_score(solution_str: str, ground_truth: str, extra_info: dict) -> dict:
    judgement = await judge(question=extra_info["question"], reference=ground_truth, solution=solution_str)
    return judgement.reward(acc=judgement.score)
