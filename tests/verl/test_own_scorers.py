"""verl's own scorers: one answer does not change the scores of others."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from reward_loop.verl.own_scorers import default_compute_score
from tests.fork_server import output_of

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
    "import reward_loop.verl.own_scorers",
    "import verl.utils.reward_score.prime_math, reward_loop.verl.own_scorers",
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
    code = "import reward_loop.verl.own_scorers\n" + LARGE.format(texts=texts)
    assert output_of(code, tmp_path).count("too large") == len(texts)


@pytest.mark.parametrize(
    "text",
    [
        "2**10000",
        "x**100",
        "(1/(1+sqrt(2)))**2",
        "4**0.5",
        "9**(1/2)",
        "factorial(5)**2",
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


def dies(ground_truth: str, answer: str) -> float:
    """Stands for an answer whose verification kills its process."""
    if answer == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(ground_truth == f"\\boxed{{{answer}}}")


@pytest.fixture
def math_verify(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return verl's module, whose processes compare texts."""
    from verl.utils.reward_score import math_verify

    from reward_loop.verl import own_scorers

    monkeypatch.setattr(math_verify, "_verify_in_subprocess", dies)
    own_scorers._guard_math_verify(math_verify)  # reads the changed function
    yield math_verify
    monkeypatch.undo()
    own_scorers._guard_math_verify(math_verify)


def test_math_verify_works_after_a_process_of_its_pool_has_died(math_verify: Any) -> None:
    """https://github.com/verl-project/verl/issues/8011: without the guard, each later score is 0."""
    with pytest.raises(RuntimeError, match="lost its processes 3 times on this answer"):
        math_verify.compute_score("kills", "4")
    assert math_verify.compute_score("4", "4") == 1.0
    assert math_verify.compute_score("5", "4") == 0.0
    for process in list(math_verify._get_pool()._processes.values()):
        process.kill()
        process.join()
    assert math_verify.compute_score("4", "4") == 1.0
