"""A reward function for GSM8K: 1 if the final answer of a solution equals the reference answer, else 0.

Score stored solutions with it:

    reward-loop score examples/gsm8k/reward.py:compute_score rollouts.jsonl
"""

import re
from fractions import Fraction

# The data set marks final answers with `####`; the model solutions that OpenAI published use `A:`.
FINAL_ANSWER = re.compile(r"(?:####|\bA:)[ \t]*([^\n]*)")
NUMBER = re.compile(r"([-+]?\d{0,40}\.?\d{1,40})(?:/(\d{1,40}))?(%?)")


def final_answer(text: str) -> str | None:
    """Return the text after the last answer mark, or None if there is no mark."""
    answers = FINAL_ANSWER.findall(text)
    return answers[-1] if answers else None


def as_number(text: str) -> Fraction | None:
    """Parse a number such as `$1,234.50`, `18.`, `1/2` or `50%`; return None if the text is not a number."""
    found = NUMBER.fullmatch(re.sub(r"[,$ ]", "", text.strip().rstrip(".")))
    if found is None or (found[2] and not int(found[2])):
        return None
    return Fraction(found[1]) / int(found[2] or 1) / (100 if found[3] else 1)


def compute_score(solution_str: str, ground_truth: str) -> dict:
    """Compare the final answers. The ground truth is a number, or a solution that ends in one."""
    reference = str(ground_truth)
    expected = as_number(final_answer(reference) or reference)
    if expected is None:
        raise ValueError(f"the ground truth has no final number: {reference[-80:]!r}")
    answer = final_answer(solution_str)
    correct = answer is not None and as_number(answer) == expected
    return {"score": float(correct), "acc": correct, "answer": answer or ""}
