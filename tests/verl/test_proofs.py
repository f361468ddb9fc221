"""What a broken scorer returned does not reach the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.records.events import health
from tests.fork_server import output_of
from tests.verl import rewards
from tests.verl.runs import train
from tests.verl.test_own_scorers import FORGES, MATRIX, SOURCE

pytestmark = pytest.mark.integration


def test_no_forged_score_is_trained_on(tmp_path: Path, tiny_generative_model: Path) -> None:
    run = train(tmp_path, tiny_generative_model, "trainer.total_training_steps=2", function="forgeable")
    forging = 0
    for step in (1, 2):
        rows, metrics = run.rollouts(step), run.steps[step]
        # Only the responses that break the scorer are masked; a forged score would be 1.
        assert [row["score"] for row in rows] == [None if rewards.forges(row["output"]) else 0.0 for row in rows]
        broken = sum(rewards.forges(row["output"]) for row in rows)
        assert metrics["reward_loop/failed"] == broken
        assert metrics["reward_loop/scored"] == 32 - broken
        assert (
            (metrics["reward_loop/proofs/failed"] > 0) == (metrics["reward_loop/proofs/rescored"] > 0) == (broken > 0)
        )
        forging += broken
    assert forging
    warnings = health(tmp_path / "checkpoints" / "rewards")
    assert "failed a proof" in next(one for one in warnings if one["monitor"] == "proofs")["message"]


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
