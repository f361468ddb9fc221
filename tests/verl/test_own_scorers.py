"""verl's own scorers: one answer does not change the scores of others."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from reward_loop import RewardSample, ScoringFunction
from reward_loop.verl.workers.default_scorer import default_compute_score
from tests.support.fork_server import output_of

pytestmark = pytest.mark.integration  # imports verl

SOURCE = "numina_cn_k12"
MATRIX = "\\begin{pmatrix}1\\\\2\\end{pmatrix}"

FORGES = (
    r"""[exec("import sys\nsetattr(sys.modules['verl.utils.reward\x5fscore.prime\x5fmath'],'grade\x5fanswer',max)")]"""
)
"""Makes prime_math accept every answer. Without underscores and equality signs, at which prime_math cuts answers."""

SCRIPT = """
import sys
{guard}
from verl.utils.reward_score import default_compute_score
score = lambda answer, truth: default_compute_score({source!r}, "\\\\boxed{{" + answer + "}}", truth)
print(score("5", "4"), score({answer!r}, {matrix!r}), score("5", "4"), score("4", "4"))
"""

GUARDS = [
    "",
    "import reward_loop.verl.workers.default_scorer",
    "import verl.utils.reward_score.prime_math, reward_loop.verl.workers.default_scorer",
]


@pytest.mark.parametrize(("guard", "last"), zip(GUARDS, ["1.0 1.0", "0.0 1.0", "0.0 1.0"], strict=True))
def test_an_answer_to_prime_math_cannot_forge_the_scores_of_later_ones(guard: str, last: str, tmp_path: Path) -> None:
    """https://github.com/verl-project/verl/issues/7603; without the guard, it does."""
    code = SCRIPT.format(guard=guard, source=SOURCE, answer=FORGES, matrix=MATRIX)
    assert output_of(code, tmp_path).strip().endswith(f"0.0 0.0 {last}")


@pytest.mark.parametrize(
    "answer",
    [
        "[open('{path}', 'w')]",
        "1*\\pi or open('{path}', 'w')",
        "open('{path}', 'w') or \\pi",
        "open('{path}', 'w')",
        "sin(open('{path}', 'w'))",
        "N(\"open('{path}', 'w')\")",
        "[[].append(open('{path}', 'w'))]",
        "Matrix([open('{path}', 'w')])",
        "(lambda: open('{path}', 'w'))()",
        "[x for x in [open('{path}', 'w')]]",
        "Point(open('{path}', 'w'))",
    ],
)
@pytest.mark.parametrize("truth", [MATRIX, "2\\pi", "x+1", "(1, 2)"])
def test_no_answer_is_evaluated(answer: str, truth: str, tmp_path: Any) -> None:
    path = tmp_path / "written"
    assert default_compute_score(SOURCE, "\\boxed{" + answer.format(path=path) + "}", truth) == 0.0
    assert not path.exists()


@pytest.mark.parametrize("answer", ["9**9**9*\\pi", "[9**9**9]", "(" * 5000 + "\\pi", "1*\\pi" * 5000])
def test_no_answer_takes_long(answer: str) -> None:
    assert default_compute_score(SOURCE, "\\boxed{" + answer + "}", MATRIX) == 0.0


LARGE = """
from verl.utils.reward_score.prime_math import grader
for text in {texts!r}:
    try:
        grader.parse_expr(text)
    except ValueError as error:
        print(error)
"""


def test_sympy_computes_no_large_number(tmp_path: Path) -> None:
    texts = ["9**9**9+x", "x**9**9", "(1/3)**(10**9)", "sqrt(2)**(10**9)", "2**factorial(20)", "factorial(10**8)"]
    texts += ["binomial(10**8,10**7)", "1e999999999", "1e-999999999", "[1, (2, 10**(10**10))]"]
    code = "import reward_loop.verl.workers.default_scorer\n" + LARGE.format(texts=texts)
    assert output_of(code, tmp_path).count("too large") == len(texts)


@pytest.mark.parametrize(
    "text",
    [
        "2**10000",
        "x**100",
        "(1/(1+sqrt(2)))**2",
        "4**0.5",
        "9**(1/2)",
        "factorial(5)*2",
        "10**1000",
        "exp(100)",
        "0.001",
    ],
)
def test_sympy_computes_numbers_that_are_not_large(text: str) -> None:
    assert importlib.import_module("verl.utils.reward_score.prime_math.grader").parse_expr(text) is not None


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("2\\pi", "2\\pi", 1.0),
        ("6.2831853", "2\\pi", 1.0),
        ("3*\\pi/4", "\\frac{3\\pi}{4}", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("3\\sqrt{2}", "\\sqrt{18}", 1.0),
        ("x^2+1", "1+x^2", 1.0),
        ("(x+1)(x-1)", "x^2-1", 1.0),
        ("sin(x)", "sin(x)", 1.0),
        (MATRIX, MATRIX, 1.0),
        ("11,\\! 111", "11111", 1.0),
        ("50\\%", "0.5", 1.0),
        ("5", "4", 0.0),
        ("3\\pi", "2\\pi", 0.0),
    ],
)
def test_the_scores_are_those_of_verl(answer: str, truth: str, score: float) -> None:
    assert default_compute_score(SOURCE, f"\\boxed{{{answer}}}", truth) == score
    assert default_compute_score("openai/gsm8k", "#### 72", "72") == 1.0


@pytest.mark.parametrize(
    ("source", "answer", "score"),
    [("openai/gsm8k", "#### 42", 1.0), ("math_dapo", "Answer: 42", 1.0), ("aime25", "\\boxed{42}", 1.0),
     ("openai/gsm8k", "#### 41", 0.0), ("math_dapo", "Answer: 41", -1.0)],
)  # fmt: skip
@pytest.mark.parametrize("behind", ["", "\n" + "Checked. " * 300])
def test_the_whole_response_is_read(source: str, answer: str, score: float, behind: str) -> None:
    """https://github.com/verl-project/verl/issues/7274: verl reads the last 300 characters."""
    found = default_compute_score(source, f"So:\n{answer}{behind}", "42")
    assert (found["score"] if isinstance(found, dict) else found) == score


@pytest.mark.parametrize("behind", ["", "\n" + "Checked. " * 300])
@pytest.mark.parametrize("answer", ["So \\boxed{1,000}.", "Answer: \\boxed{1,000}", "\\boxed{7}?\nAnswer: 1,000"])
def test_what_a_reasoning_says_does_not_replace_the_answer_of_math_dapo(answer: str, behind: str) -> None:
    """verl prefers an ``Answer:``, which it finds only in the last 300 characters."""
    reasoning = "The last line is Answer: $Answer.\nAnswer: 7? No.\n" + "Let me think. " * 40
    truth = "1,000" if answer.startswith("So") else "1000"
    assert default_compute_score("math_dapo", f"{reasoning}\n{answer}{behind}", truth)["score"] == 1.0


def verified(solution_str: str, ground_truth: str) -> float:
    from reward_loop.verl.workers.own_scorers import guard

    guard()
    from verl.utils.reward_score import math_verify

    score: float = math_verify.compute_score(solution_str, ground_truth)
    assert math_verify._pool is None
    return score


async def test_math_verify_has_no_pool_in_an_isolated_call() -> None:
    """https://github.com/verl-project/verl/issues/8011: after a process of the pool has died, each score is 0."""
    scoring = ScoringFunction(verified, isolation="process", max_processes=1)
    answers = [("\\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{2}", "0.5")]
    results = [await scoring(RewardSample(answer, ground_truth=truth)) for answer, truth in answers]
    await asyncio.to_thread(scoring.close)
    assert [(result.error, result.score) for result in results] == [(None, 1.0), (None, 0.0)]
