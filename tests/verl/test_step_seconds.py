from __future__ import annotations

import pytest

from reward_loop.verl.trainer.reward_metrics import overlap_metrics

pytestmark = pytest.mark.integration  # imports verl


def test_the_metrics_of_a_scripted_step() -> None:
    """Judging lasts while a reward is pending: from 0 to 4, and from 8 to 9."""
    judged = [(0, 4), (1, 2), (2.5, 3), (8, 9)]
    assert overlap_metrics(10, generation=3, waiting=1, judged=judged) == {
        "reward_pipeline/generation_s": 3,
        "reward_pipeline/judging_s": 5,
        "reward_pipeline/training_s": 6,
        "reward_pipeline/waiting_for_rewards_s": 1,
        "reward_pipeline/waiting_share": pytest.approx(0.1),
        "reward_pipeline/hidden_share": pytest.approx(0.8),
    }
