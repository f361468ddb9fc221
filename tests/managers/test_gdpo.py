import pytest

from reward_loop import RewardSample
from reward_loop.managers import GDPORewardLoopManager

CONFIG = {"trainer": {"experiment_name": "e1"}, "algorithm": {"gdpo_reward_keys": ["right", "brief"]}}


async def test_each_reward_is_there():
    def function(extra_info):
        return {"score": 1.5, "right": True, "brief": 0.5, "experiment": extra_info["experiment_name"]}

    reward = await GDPORewardLoopManager(CONFIG, compute_score=function).run_single(RewardSample("x"))
    info = reward["reward_extra_info"]
    assert (reward["reward_score"], info["right"], info["brief"], info["experiment"]) == (1.5, True, 0.5, "e1")


NOT_COMPLETE = [
    1.0,
    {"score": 1.0, "right": 1.0},
    {"score": 1, "right": 1, "brief": "yes"},
    {"score": 1, "right": 1, "brief": float("nan")},
]


@pytest.mark.parametrize("returned", NOT_COMPLETE)
async def test_a_sample_that_lacks_one_has_failed(returned):
    manager = GDPORewardLoopManager(CONFIG, compute_score=lambda: returned)
    info = (await manager.run_single(RewardSample("x", uid="u1")))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert "sample u1" in info["reward_error"]
    assert "brief" in info["reward_error"]
    assert "test_gdpo.py" in info["reward_error"]


async def test_without_a_score_each_reward_is_the_default_score():
    config = {**CONFIG, "reward_loop": {"on_unscored": "default", "default_score": -1}}
    reward = await GDPORewardLoopManager(config, compute_score=lambda: None).run_single(RewardSample("x"))
    info = reward["reward_extra_info"]
    assert (reward["reward_score"], info["right"], info["brief"]) == (-1.0, -1.0, -1.0)
    assert info["reward_masked"] is False


async def test_a_masked_sample_has_no_made_up_rewards_that_would_count_in_means():
    masked = {**CONFIG, "reward_loop": {"on_unscored": "mask", "on_failed": "mask"}}
    for returned in (None, {"score": 1.0, "right": 1.0}):
        manager = GDPORewardLoopManager(masked, compute_score=lambda value=returned: value)
        reward = await manager.run_single(RewardSample("x"))
        info = reward["reward_extra_info"]
        assert (reward["reward_score"], info["reward_masked"]) == (0.0, True)
        assert not {"right", "brief"} & info.keys()


async def test_without_keys_it_is_as_naive():
    reward = await GDPORewardLoopManager(compute_score=lambda: 2.0).run_single(RewardSample("x"))
    assert reward["reward_score"] == 2.0
