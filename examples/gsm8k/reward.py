"""A reward function for GSM8K: 1 if the final answer of a solution equals the reference answer, else 0.

Score stored solutions with it:

    reward-loop score examples/gsm8k/reward.py:compute_score rollouts.jsonl
"""

import re
from decimal import Decimal, InvalidOperation

# The data set marks final answers with `####`; the model solutions that OpenAI published use `A:`.
FINAL_ANSWER = re.compile(r"(?:####|\bA:)[ \t]*([^\n]*)")


def final_answer(text: str) -> str | None:
    """Return the text after the last answer mark, or None if there is no mark."""
    answers = FINAL_ANSWER.findall(text)
    return answers[-1] if answers else None


def as_number(text: str) -> Decimal | None:
    """Parse a number such as `$1,234.50` or `18.`; return None if the text is not a number."""
    text = text.strip().rstrip(".").replace(",", "").replace("$", "").replace(" ", "")
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def compute_score(solution_str: str, ground_truth: str) -> dict:
    """Compare the final answers. The ground truth is a number, or a solution that ends in one."""
    reference = str(ground_truth)
    expected = as_number(final_answer(reference) or reference)
    if expected is None:
        raise ValueError(f"the ground truth has no final number: {reference[-80:]!r}")
    answer = final_answer(solution_str)
    correct = answer is not None and as_number(answer) == expected
    return {"score": float(correct), "acc": correct, "answer": answer or ""}
