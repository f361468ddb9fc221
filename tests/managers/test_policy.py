from __future__ import annotations

import pickle
import sys

import pytest

from reward_loop.config import RewardLoopConfig
from reward_loop.managers import NaiveRewardLoopManager
from reward_loop.managers.base import decide
from reward_loop.types import Outcome, RewardResult, RewardSample


def test_the_default_score_of_a_sample_without_a_score_has_no_parts() -> None:
    result = RewardResult(Outcome.UNSCORED, None, extra_info={"turn_level_scores": [1.0, 2.0], "words": 3})
    reward = decide(result, RewardLoopConfig(on_unscored="default", default_score=-1.0)).to_reward()
    assert reward["reward_score"] == -1.0
    assert reward["reward_extra_info"]["words"] == 3
    assert "turn_level_scores" not in reward["reward_extra_info"]


def test_a_key_that_a_sample_lacks_is_none_also_in_another_process() -> None:
    result = RewardResult(Outcome.FAILED, None, error="no score")
    reward = decide(result, RewardLoopConfig(on_failed="default")).to_reward()
    info = pickle.loads(pickle.dumps(reward))["reward_extra_info"]
    assert info["acc"] is None
    assert "acc" not in info


@pytest.mark.parametrize(
    ("policy", "metric", "expected"),
    [("default", "acc", -0.5), ("mask", "acc", 0.0), ("default", "reward", None), ("default", None, None)],
)
async def test_a_sample_without_a_score_has_the_metric_by_which_verl_filters_groups(
    policy: str, metric: str | None, expected: float | None
) -> None:
    config = {
        "algorithm": {"filter_groups": {"enable": metric is not None, "metric": metric or "acc"}},
        "reward_loop": {"on_failed": policy, "default_score": -0.5},
    }
    manager = NaiveRewardLoopManager(
        config, compute_score=lambda solution_str: {"score": float(solution_str), "acc": 1}
    )
    reward = await manager.run_single(RewardSample("no number"))
    assert reward["reward_extra_info"].get("acc") == expected
    assert "reward" not in reward["reward_extra_info"], "verl has a column of its own with this name"
    assert (await manager.run_single(RewardSample("1")))["reward_extra_info"]["acc"] == 1


def test_options_in_a_mapping_need_no_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reward_loop.verl.samples", None)  # its import fails
    manager = NaiveRewardLoopManager({"timeout": 60}, compute_score=lambda solution_str: 1.0)
    assert manager.options.timeout == 60
