import pytest

from reward_loop import NaiveRewardLoopManager, RewardSample
from reward_loop.managers import CompositeRewardLoopManager


async def reward(returned, **sample):
    return await NaiveRewardLoopManager(compute_score=lambda: returned).run_single(
        RewardSample("x", uid="u1", **sample)
    )


@pytest.mark.parametrize(
    ("parts", "length"),
    [
        ({"token_level_scores": [0.5, 0, True]}, 3),
        ({"token_level_scores": [0.5, 0.5]}, None),
        ({"turn_level_scores": (1, 2, 3)}, 7),
        ({"turn_level_scores": []}, 7),
    ],
)
async def test_valid_dense_rewards_are_kept(parts, length):
    info = (await reward({"score": 1.0, **parts}, response_length=length))["reward_extra_info"]
    assert info["reward_outcome"] == "scored"
    assert parts.items() <= info.items()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"token_level_scores": [1, 2]}, "2 token_level_scores, and the response has 3 tokens"),
        ({"token_level_scores": "abc"}, "token_level_scores must be a list of finite numbers; got 'abc'"),
        ({"turn_level_scores": 1.0}, "turn_level_scores must be a list"),
        ({"turn_level_scores": [1, float("nan")]}, "finite numbers"),
        ({"turn_level_scores": [1, None]}, "finite numbers"),
        ({"turn_level_scores": [1, 1e39]}, "finite numbers"),
    ],
)
async def test_invalid_dense_rewards_are_failures(parts, message):
    info = (await reward({"score": 1.0, **parts}, response_length=3))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert info["reward_error"].startswith("sample u1: ")
    assert message in info["reward_error"]


async def test_attempts_and_times_stay_when_dense_rewards_are_invalid():
    calls = iter([ConnectionError("busy"), {"score": 1.0, "turn_level_scores": "abc"}])

    def judge():
        if isinstance(returned := next(calls), Exception):
            raise returned
        return returned

    manager = NaiveRewardLoopManager({"retry": {"initial_wait": 0}}, compute_score=judge)
    info = (await manager.run_single(RewardSample("x")))["reward_extra_info"]
    assert (info["reward_outcome"], info["reward_attempts"]) == ("failed", 2)


async def test_dense_rewards_of_a_composite_component_fail(tmp_path):
    path = tmp_path / "parts.py"
    path.write_text("def compute_score(): return {'score': 1, 'turn_level_scores': [1]}\n")
    config = {"reward_loop": {"components": {"a": {"path": str(path)}}}}
    info = (await CompositeRewardLoopManager(config).run_single(RewardSample("x", uid="u1")))["reward_extra_info"]
    assert info["reward_outcome"] == "failed"
    assert "sample u1: reward_loop.components.a returned turn_level_scores" in info["reward_error"]
