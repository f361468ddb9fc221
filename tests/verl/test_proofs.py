"""A scorer of verl that an answer breaks, in a function of the user. `test_workers` has one in the workers of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fork_server import output_of
from tests.verl.test_own_scorers import FORGES, MATRIX, SOURCE

pytestmark = pytest.mark.integration


SCRIPT = """
import asyncio
from reward_loop import RewardLoopConfig, RewardSample, ScoringFunction

def compute_score(solution_str, ground_truth):
    from verl.utils.reward_score import prime_math  # without the guard
    return float(prime_math.compute_score(solution_str, ground_truth)[0])

async def main():
    options = RewardLoopConfig(isolation="process", max_processes=1)
    function = ScoringFunction(compute_score, options=options)
    answers = [(r"\\boxed{{%d}}" % (i + i % 2), str(i)) for i in range(40)]
    answers[10] = ({forges!r}, {matrix!r})
    results = await asyncio.gather(*(
        function(RewardSample(answer, data_source={source!r}, ground_truth=truth)) for answer, truth in answers
    ))
    right = [float(i % 2 == 0) if i != 10 else None for i in range(40)]
    print([result.score for result in results] == right, function.proofs.take().rescored > 1)
    function.close()

asyncio.run(main())
"""


def test_a_function_that_calls_prime_math_without_the_guard(tmp_path: Path) -> None:
    """https://github.com/verl-project/verl/issues/7603, in a user's function in worker processes."""
    code = SCRIPT.format(forges=f"\\boxed{{{FORGES}}}", matrix=MATRIX, source=SOURCE)
    assert output_of(code, tmp_path).strip().endswith("True True")
