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
    ("options", "message"),
    [
        ({"timout": 3}, r"timout: unknown option; did you mean 'timeout'\? Known here: "),
        ({"memory_limit_mb": 3}, r"memory_limit_mb: .*did you mean 'max_memory_mb'"),
        ({"limits": {"judge": {"max_concurent": 64}}}, r"limits.judge.max_concurent: .* mean 'max_concurrent'"),
        # A name of the user's that is an option's elsewhere.
        ({"limits": {"retry": {"max_concurent": 64}}}, r"limits.retry.max_concurent: .* mean 'max_concurrent'"),
        ({"zzz": 3}, r"zzz: unknown option\. Known here: batch, "),
        ({"timeout": "soon"}, r"timeout: .*valid number.*; got 'soon'"),
        ({"timeout": 0}, r"timeout: .*greater than 0; got 0"),
        ({"on_failed": "crash"}, r"on_failed: .*'raise', 'default' or 'mask'"),
        ({"default_score": float("nan")}, r"default_score: .*finite"),
        ({"limits": {"a": {"tokens_per_minute": 10**400}}}, r"limits.a.tokens_per_minute: .*less than or equal to"),
        (
            {"limits": {"a": {"estimated_tokens_per_request": math.inf}}},
            r"limits.a.estimated_tokens_per_request: .*finite",
        ),
    ],
)
def test_messages(options, message):
    with pytest.raises(ConfigError, match=rf"reward_loop\.{message}"):
        parse(RewardLoopConfig, options, "reward_loop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([1], r"outer: expected a mapping of options, got \[1\]"),
        ({}, "outer.name: required"),
        ({"name": "a", "inner": {"rats": 1}}, r"inner.rats: unknown option; did you mean 'rate'\? Known here: rate"),
    ],
)
def test_messages_of_other_groups_of_options(options, message):
    with pytest.raises(ConfigError, match=message):
        parse(Outer, options, "outer")


def test_all_problems_are_named():
    with pytest.raises(ConfigError) as caught:
        parse(RewardLoopConfig, {"timout": 3, "max_threads": 0}, "reward_loop")
    assert len(str(caught.value).splitlines()) == 2


def test_every_option_is_documented():
    assert all(field.description for field in RewardLoopConfig.model_fields.values())
