from __future__ import annotations

from reward_loop.config import RewardLoopConfig
from reward_loop.managers.policy import apply_policy
from reward_loop.types import Outcome, RewardResult


def test_the_default_score_of_a_sample_without_a_score_has_no_parts() -> None:
    result = RewardResult(Outcome.UNSCORED, None, extra_info={"turn_level_scores": [1.0, 2.0], "words": 3})
    reward = apply_policy(result, RewardLoopConfig(on_unscored="default", default_score=-1.0))
    assert reward["reward_score"] == -1.0
    assert reward["reward_extra_info"]["words"] == 3
    assert "turn_level_scores" not in reward["reward_extra_info"]
