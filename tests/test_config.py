import math
from collections import UserDict

import pytest

from reward_loop import ConfigError, RewardLoopConfig
from reward_loop.config import Config, parse


class Inner(Config):
    rate: int = 1


class Outer(Config):
    inner: Inner | None = None
    name: str


def test_defaults():
    config = parse(RewardLoopConfig, None, "reward_loop")
    assert (config.on_failed, config.on_unscored, config.default_score) == ("mask", "mask", 0.0)
    assert (config.timeout, config.max_threads, config.max_failed_share) == (300, 64, 0.5)


def test_an_instance_stays_as_it_is():
    config = RewardLoopConfig(timeout=None)
    assert parse(RewardLoopConfig, config, "reward_loop") is config


def test_values_are_read_as_a_command_line_writes_them():
    assert parse(RewardLoopConfig, {"timeout": "2.5"}, "reward_loop").timeout == 2.5


def test_mappings_of_other_libraries():
    assert parse(Outer, UserDict(name="a", inner=UserDict(rate=2)), "outer").inner == Inner(rate=2)
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"name": "a", "inner": {"rate": "${.other}", "other": 3}})
    del config.inner["other"]
    config.inner.rate = 3
    assert parse(Outer, config, "outer").inner == Inner(rate=3)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (RewardLoopConfig, {"timout": 3}, r"reward_loop.timout: unknown option; did you mean 'timeout'\? Known here: "),
        (RewardLoopConfig, {"memory_limit_mb": 3}, r"reward_loop.memory_limit_mb: .*did you mean 'max_memory_mb'"),
        (
            RewardLoopConfig,
            {"limits": {"judge": {"max_concurent": 64}}},
            r"reward_loop.limits.judge.max_concurent: unknown option; did you mean 'max_concurrent'",
        ),
        (
            RewardLoopConfig,
            {"limits": {"retry": {"max_concurent": 64}}},  # a name of the user's that is an option's elsewhere
            r"reward_loop.limits.retry.max_concurent: unknown option; did you mean 'max_concurrent'",
        ),
        (RewardLoopConfig, {"zzz": 3}, r"reward_loop.zzz: unknown option\. Known here: batch, "),
        (RewardLoopConfig, {"timeout": "soon"}, r"reward_loop.timeout: .*valid number.*; got 'soon'"),
        (RewardLoopConfig, {"timeout": 0}, r"reward_loop.timeout: .*greater than 0; got 0"),
        (RewardLoopConfig, {"on_failed": "crash"}, r"reward_loop.on_failed: .*'raise', 'default' or 'mask'"),
        (RewardLoopConfig, {"default_score": float("nan")}, r"reward_loop.default_score: .*finite"),
        (
            RewardLoopConfig,
            {"limits": {"judge": {"tokens_per_minute": 10**400}}},
            r"reward_loop.limits.judge.tokens_per_minute: .*less than or equal to",
        ),
        (
            RewardLoopConfig,
            {"limits": {"judge": {"estimated_tokens_per_request": math.inf}}},
            r"reward_loop.limits.judge.estimated_tokens_per_request: .*finite",
        ),
        (RewardLoopConfig, [1], r"reward_loop: expected a mapping of options, got \[1\]"),
        (Outer, {}, r"reward_loop.name: required"),
        (
            Outer,
            {"name": "a", "inner": {"rats": 1}},
            r"inner.rats: unknown option; did you mean 'rate'\? Known here: rate",
        ),
    ],
)
def test_messages(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        parse(cls, options, "reward_loop")


def test_all_problems_are_named():
    with pytest.raises(ConfigError) as caught:
        parse(RewardLoopConfig, {"timout": 3, "max_threads": 0}, "reward_loop")
    assert len(str(caught.value).splitlines()) == 2


def test_every_option_is_documented():
    assert all(field.description for field in RewardLoopConfig.model_fields.values())
