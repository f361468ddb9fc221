from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.scoring import ScoringFunction
from reward_loop.verl.resolve import read, unknown_overrides, without_reward
from tests.verl.configs import resolved, settled


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ppo_trainer", "fsdp"),
        ("cpu", "fsdp2"),
        ("ppo_megatron_trainer", "megatron"),
        ("reward_loop_trainer", "fsdp"),
    ],
)
def test_the_default_settings(name: str, engine: str) -> None:
    settings = resolved(name=name)
    assert settings.config.actor_rollout_ref.actor.strategy == engine
    assert (settings.manager.name, settings.function, settings.model) == ("naive", None, None)
    assert settings.mode.name == "sync"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("reward_loop.timout=60", "reward_loop.timout: unknown option; did you mean 'timeout'?"),
        ("+reward_loop.timout=60", "did you mean 'timeout'?"),
        ("reward_loop.cache.enabeld=true", "reward_loop.cache.enabeld: unknown option; did you mean 'enabled'?"),
        ("reward_model.enabel=True", "did you mean 'enable'?"),
        ("reward.reward_manger.name=dapo", "did you mean 'reward_manager'?"),
        ("custom_reward_function.pth=f.py", "did you mean 'path'?"),
    ],
)
def test_a_misspelt_option_gets_the_right_name_before_hydra_reads_it(word: str, message: str) -> None:
    (found,) = unknown_overrides(["--config-name", "cpu", "trainer.nnodes=1", word])
    assert message in found


def test_options_that_exist_and_those_of_open_groups_pass_before_hydra() -> None:
    words = [
        "reward_loop.timeout=60",
        "+reward_loop.limits.a.max_concurrent=8",
        "reward.num_workers=2",
        "~reward_loop.cache",
    ]
    words += [
        "reward.custom_reward_function.reward_kwargs.bonus=1",
        "+reward_model.server.env.A=1",
        "data.x=1",
        "--check",
    ]
    words += ["reward_model.rollout.name=vllm", "+reward_model.rollout.engine_kwargs.vllm.x=1"]
    assert list(unknown_overrides(words)) == []


def test_settings_are_read_again_from_a_resolved_configuration() -> None:
    settings = resolved("reward_model.reward_manager=dapo", "custom_reward_function.path=f.py")
    assert read(settings.config) == settings


def test_settings_can_be_sent_to_other_processes() -> None:
    settings = resolved("custom_reward_function.path=f.py", "trainer.v1.trainer_mode=reward_pipeline")
    packed = pickle.dumps(settings)
    assert pickle.loads(packed) == settings
    assert len(packed) < 50_000  # from 100 KB on, Ray cannot restart an actor whose argument is lost


def test_the_job_is_part_of_new_settings_and_of_their_configuration() -> None:
    settings = resolved()
    with_job = settings.with_job("127.0.0.1:5")
    assert (with_job.options.job, with_job.config.reward_loop.job) == ("127.0.0.1:5", "127.0.0.1:5")
    assert (settings.options.job, settings.config.reward_loop.job) == (None, None)


def test_the_yaml_defaults_are_those_of_the_options() -> None:
    settings = resolved("trainer.default_local_dir=checkpoints/a")
    assert settings.options == RewardLoopConfig(log_dir=str(Path.cwd() / "checkpoints/a/rewards"))


def test_the_yaml_file_has_all_options_so_that_the_command_line_accepts_them() -> None:
    assert resolved().config.reward_loop.keys() == RewardLoopConfig.model_fields.keys()


def test_records_are_off_without_log_dir() -> None:
    assert resolved("reward_loop.log_dir=null").options == RewardLoopConfig()


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("custom_reward_function.path=f.py", "reward.custom_reward_function.path", "f.py"),
        ("custom_reward_function.name=judge", "reward.custom_reward_function.name", "judge"),
        (
            "custom_reward_function.path=f.py +custom_reward_function.reward_kwargs.x=1",
            "reward.custom_reward_function.reward_kwargs.x",
            1,
        ),
        (
            "reward_model.reward_manager=dapo +reward_model.reward_kwargs.max_resp_len=9",
            "reward.reward_kwargs.max_resp_len",
            9,
        ),
        ("reward_model.rollout.name=transformers", "reward.reward_model.rollout.name", "transformers"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.url", "http://x"),
        ("sandbox_fusion.max_concurrent=7", "reward.sandbox_fusion.max_concurrent", 7),
    ],
)
def test_the_keys_that_users_write_take_effect(overrides: str, key: str, value: object) -> None:
    assert OmegaConf.select(settled(*overrides.split()), key) == value


def test_a_ready_judge_is_named_by_its_short_name() -> None:
    from reward_loop.judges import Rubric
    from reward_loop.verl.main_ppo import check_function

    settings = resolved(
        "custom_reward_function.path=judge:rubric",
        "+custom_reward_function.reward_kwargs.criteria=[The result is correct.,{text: It is clear., weight: 0.5}]",
    )
    check_function(settings)
    assert settings.function is not None
    assert settings.function.load() is Rubric
    function = ScoringFunction(settings.function.load(), reward_kwargs=settings.function.kwargs)
    assert function.requires == {"solution_str", "extra_info"}
    assert read(settings.config) == settings


def test_verls_limits_of_the_rate_limited_manager_become_the_default_limit() -> None:
    settings = resolved("reward_model.reward_manager=rate_limited", "+reward.max_concurrent=6", "+reward.max_rpm=500")
    limit = settings.options.limits["default"]
    assert (limit.max_concurrent, limit.requests_per_minute) == (6, 500)


def test_a_module_path_alone_means_importlib() -> None:
    manager = resolved("reward_model.reward_loop_module_path=m.py", "reward_model.reward_loop_class_name=Mine").manager
    assert (manager.source, manager.module, manager.name) == ("importlib", "m.py", "Mine")
    assert manager.is_import_path


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            ["reward_model.reward_manager=dapo", "reward.reward_manager.name=gdpo"],
            ["reward_model.reward_manager=dapo", "reward.reward_manager.name=gdpo"],
        ),
        (
            ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"],
            ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=b.py"],
        ),
        (
            ["reward_model.launch_reward_fn_async=True"],
            ["reward_model.launch_reward_fn_async has no effect", "Leave it out"],
        ),
        (
            ["reward_model.use_reward_loop=False"],
            ["reward_model.use_reward_loop=False", "leave out both"],
        ),
        (["+reward_model.use_rewardloop=True"], ["reward_model.use_rewardloop", "did you mean 'use_reward_loop'"]),
        (["+reward_loop.on_fail=mask"], ["reward_loop.on_fail", "did you mean 'on_failed'"]),
        (["+reward.custom_reward_function.nam=f"], ["reward.custom_reward_function.nam"]),
        (["+reward_model.rollout.dtipe=x"], ["reward_model.rollout.dtipe", "did you mean 'dtype'"]),
        (["reward_loop.on_failed=ignore"], ["reward_loop.on_failed"]),
        (["reward_loop.timeout=-1"], ["reward_loop.timeout"]),
        (["+reward.max_rpm=5"], ["reward.max_rpm", "reward_manager=rate_limited"]),
        (
            ["+custom_reward_function.reward_kwargs.x=1"],
            ["custom_reward_function.reward_kwargs={'x': 1}", "custom_reward_function.path"],
        ),
        (["+reward_model.reward_kwargs.max_resp_len=9"], ["reward.reward_kwargs", "reward_manager=naive"]),
        (["algorithm.adv_estimator=gdpo"], ["only the sum of a sample's rewards"]),
        (["+reward_loop.components.a.path=f.py"], ["reward_loop.components", "reward_manager=composite"]),
        (
            ["reward_model.reward_manager=composite", "+reward_loop.components.a.pth=f.py"],
            ["reward_loop.components.a.pth", "did you mean 'path'"],
        ),
        (
            [
                "reward_model.reward_manager=composite",
                "+reward_loop.components.a.path=f.py",
                "custom_reward_function.path=g.py",
            ],
            ["custom_reward_function.path=g.py has no effect"],
        ),
        (["+reward_loop.group.sise=2"], ["reward_loop.group.sise", "did you mean 'size'"]),
        (["reward_model.use_reward_loop=maybe"], ["reward_model.use_reward_loop=maybe"]),
        (["reward_model.num_workers=0"], ["reward.num_workers=0"]),
        (["trainer.use_v1=False"], ["trainer.use_v1=False"]),
    ],
)
def test_options_without_effect_are_errors_that_name_them(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(*overrides)
    for name in named:
        assert name in str(caught.value)


def test_the_same_value_under_old_and_new_key_is_accepted() -> None:
    config = settled("reward_model.reward_manager=dapo", "reward.reward_manager.name=dapo")
    assert config.reward.reward_manager.name == "dapo"


@pytest.mark.parametrize("key", ["reward_model.num_workers", "reward.num_workers"])
def test_the_command_line_goes_before_a_file(key: str) -> None:
    assert settled(f"{key}=3", name="cpu").reward.num_workers == 3


def test_verls_own_reward_is_switched_off_in_a_copy() -> None:
    config = settled("custom_reward_function.path=f.py")
    copy = without_reward(config)
    assert (copy.reward.num_workers, copy.reward.reward_model.enable) == (0, False)
    assert config.reward.num_workers == 8


@pytest.mark.parametrize(
    ("ignored", "effective"),
    [
        ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
        ("critic.grad_clip", "critic.optim.clip_grad"),
    ],
)
def test_a_gradient_clip_that_verl_ignores_is_warned_of(
    ignored: str, effective: str, caplog: pytest.LogCaptureFixture
) -> None:
    settled()
    settled(f"{ignored}=0.5", f"{effective}=0.5")
    assert not caplog.messages
    settled(f"{ignored}=0.5")
    (message,) = caplog.messages
    assert message.startswith(f"{ignored}=0.5 has no effect")
    assert f"{effective}=1.0. Set that instead" in message
