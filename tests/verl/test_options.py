"""The options of a verl run that concern rewards: moved, checked, and read once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError
from reward_loop.scoring import ScoringFunction
from reward_loop.verl.options import (
    RewardQueueOptions,
    queue_shares,
    read,
)
from tests.verl.configs import resolved, settled

SEPARATE = "trainer.v1.trainer_mode=separate_async"
GRPO = ("data.train_batch_size=64", "actor_rollout_ref.rollout.n=4", SEPARATE)
PIPELINE = "trainer.v1.trainer_mode=reward_pipeline"
SAMPLER = "trainer.v1.sampler"
QUEUE = "trainer.v1.separate_async.reward_queue"


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ppo_trainer", "fsdp"),
        ("cpu", "fsdp2"),
        ("ppo_megatron_trainer", "megatron"),
    ],
)
def test_the_default_settings(name: str, engine: str) -> None:
    settings = resolved(name=name)
    assert settings.config.actor_rollout_ref.actor.strategy == engine
    assert (settings.manager.name, settings.function, settings.model) == ("naive", None, None)
    assert settings.mode.name == "sync"


def test_settings_are_read_again_and_can_be_sent_to_other_processes() -> None:
    settings = resolved("reward_model.reward_manager=dapo", "custom_reward_function.path=f.py", PIPELINE)
    assert read(settings.config) == settings
    packed = pickle.dumps(settings)
    assert pickle.loads(packed) == settings
    assert len(packed) < 50_000  # from 100 KB on, Ray cannot restart an actor whose argument is lost


def test_the_yaml_defaults_are_those_of_the_options() -> None:
    settings = resolved("trainer.default_local_dir=checkpoints/a")
    assert settings.options == RewardLoopConfig(log_dir=str(Path.cwd() / "checkpoints/a/rewards"))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("custom_reward_function.path=f.py", "reward.custom_reward_function.path", "f.py"),
        ("+custom_reward_function.reward_kwargs.x=1", "reward.custom_reward_function.reward_kwargs.x", 1),
        ("+reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs.max_resp_len", 9),
        ("reward_model.rollout.name=transformers", "reward.reward_model.rollout.name", "transformers"),
        ("sandbox_fusion.url=http://x", "reward.sandbox_fusion.url", "http://x"),
    ],
)
def test_the_keys_that_users_write_take_effect(override: str, key: str, value: object) -> None:
    assert OmegaConf.select(settled(override), key) == value


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
        ("reward_model.reward_manager=dapo reward.reward_manager.name=gdpo", "manager=dapo contradicts .*name=gdpo"),
        ("reward_model.use_reward_loop=False", "reward_model.use_reward_loop=False.*leave out both"),
        ("+reward_loop.on_fail=mask", "reward_loop.on_fail.*did you mean 'on_failed'"),
        ("algorithm.adv_estimator=gdpo", "only the sum of a sample's rewards"),
        (
            "reward_model.reward_manager=rate_limited +reward.max_rpm=5 +reward_loop.limits.default.max_concurrent=2",
            "reward.max_rpm contradicts reward_loop.limits.default",
        ),
        ("reward_model.use_reward_loop=maybe", "reward_model.use_reward_loop=maybe"),
        ("reward_model.num_workers=0", "reward.num_workers=0"),
        ("trainer.use_v1=False", "trainer.use_v1=False"),
        (f"{PIPELINE} skip.rollout_tq.enable=True", "skip.rollout_tq.enable=True"),
        (f"{PIPELINE} {SAMPLER}.custom_sampler.path=mine.py", f"{SAMPLER}.custom_sampler.path=mine.py"),
        (f"{PIPELINE} {SAMPLER}.stall_timeout_s=0", f"{SAMPLER}.stall_timeout_s"),
        (f"{SAMPLER}.poll_interval_s=0", f"{SAMPLER}.poll_interval_s: Input should be "),
        (f"{PIPELINE} +trainer.v1.reward_pipeline.mini_batch=True", "trainer.v1.reward_pipeline.mini_batch"),
        (f"{SEPARATE} +mini_batch_pipeline=True", f"mini_batch_pipeline=True contradicts .*{SEPARATE}"),
        (f"{SEPARATE} {QUEUE}.in_flight=0", f"{QUEUE}.in_flight"),
        (f"{SEPARATE} +{QUEUE}.size=9", f"{QUEUE}.size"),
    ],
)
def test_wrong_options_are_errors_that_name_them(overrides: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settled(*overrides.split())


def shares(*overrides: str) -> tuple[int, int]:
    settings = resolved(*GRPO, *overrides)
    assert settings.mode.queue is not None
    return queue_shares(settings.config, settings.mode.queue)


def test_agent_loop_workers_share_the_queue() -> None:
    workers = "actor_rollout_ref.rollout.agent.num_workers"
    assert resolved(*GRPO).mode.queue == RewardQueueOptions()
    # 64 prompts and as many to warm up, of 4 rollouts, for 8 workers.
    assert shares() == (64, 32)
    assert shares(f"{workers}=3", "trainer.v1.separate_async.num_warmup_batches=0.5") == (132, 88)
    assert shares(f"{QUEUE}.capacity=100", f"{QUEUE}.in_flight=20") == (12, 2)
    assert shares(f"{QUEUE}.capacity=1", f"{QUEUE}.in_flight=1") == (4, 1)  # a prompt's rollouts must have room


def test_an_agent_loop_manager_of_the_user_has_no_queue() -> None:
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"
    assert resolved(*GRPO, own).mode.queue is None
    assert resolved().mode.queue is None


@pytest.mark.parametrize(
    ("overrides", "mode", "by_mini_batch"),
    [
        (f"{PIPELINE} trainer.v1.reward_pipeline.one_step_off_policy=False", "reward_pipeline", True),
        ("+mini_batch_pipeline=True", "reward_pipeline", True),  # as in the recipe
        ("+mini_batch_pipeline=False", "sync", False),
        (f"{PIPELINE} +mini_batch_pipeline=False", "reward_pipeline", False),
        ("", "sync", True),
    ],
)
def test_the_recipes_option_chooses_the_mode(overrides: str, mode: str, by_mini_batch: bool) -> None:
    config = settled(*overrides.split()).trainer.v1
    assert (config.trainer_mode, config.reward_pipeline.mini_batch_pipeline) == (mode, by_mini_batch)
