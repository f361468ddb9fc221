import pytest

from reward_loop import ConfigError, RewardLoopConfig, RewardSample
from reward_loop.managers import DAPORewardLoopManager
from reward_loop.managers.scorer import load_scorer

BUFFER = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}


def manager(function=lambda: 1.0, **kwargs):
    config = {"reward": {"reward_kwargs": {"max_resp_len": 10, "overlong_buffer_cfg": BUFFER, **kwargs}}}
    return DAPORewardLoopManager(config, compute_score=function)


async def test_the_penalty_is_taken_off_and_logged():
    reward = await manager(lambda: {"score": 1.0}).run_single(RewardSample("x", response_length=8))
    assert reward["reward_score"] == 0.5
    info = reward["reward_extra_info"]
    assert (info["score"], info["overlong_reward"], info["overlong"]) == (1.0, -0.5, True)
    short = await manager().run_single(RewardSample("x", response_length=2))
    assert (short["reward_score"], short["reward_extra_info"]["overlong"]) == (1.0, False)


async def test_no_log_and_no_penalty_unless_asked_for():
    quiet = await manager(overlong_buffer_cfg={**BUFFER, "log": False}).run_single(RewardSample("x", response_length=8))
    assert quiet["reward_score"] == 0.5
    assert "overlong" not in quiet["reward_extra_info"]
    for config in (None, {"reward": {}}, {"reward": {"reward_kwargs": {"overlong_buffer_cfg": {"enable": False}}}}):
        off = DAPORewardLoopManager(config, compute_score=lambda: 1.0)
        assert (await off.run_single(RewardSample("x")))["reward_score"] == 1.0


async def test_a_sample_without_a_score_has_no_penalty():
    reward = await manager(lambda: None).run_single(RewardSample("x", response_length=10))
    assert (reward["reward_score"], reward["reward_extra_info"]["reward_outcome"]) == (0.0, "unscored")


async def test_a_missing_response_length_is_an_error():
    with pytest.raises(ConfigError, match="response_length"):
        await manager().run_single(RewardSample("x"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_resp_len": None}, r"max_resp_len.*got None"),
        ({"max_resp_len": 3}, r"at least overlong_buffer_cfg.len \(4\); got 3"),
        ({"overlong_buffer_cfg": {**BUFFER, "len": 0}}, "enable=False"),
        ({"overlong_buffer_cfg": {**BUFFER, "lenght": 4}}, r"overlong_buffer_cfg\.lenght"),
    ],
)
def test_wrong_options_are_named(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        manager(**kwargs)


def test_a_command_that_cannot_give_its_options_is_refused_instead_of_scoring_without_a_penalty():
    with pytest.raises(ConfigError, match=r"`dapo` has its options in verl's configuration.*Use `naive`"):
        load_scorer(lambda solution_str: 1.0, "dapo", RewardLoopConfig())
