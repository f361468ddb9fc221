"""The options of the trainer modes, and what the modes cannot do."""

from __future__ import annotations

import pytest

from reward_loop.errors import ConfigError
from reward_loop.verl.mode_options import (
    PipelineOptions,
    RewardQueueOptions,
    check_group_manager,
    queue_shares,
    read_mode,
)
from tests.verl.configs import resolved, settled

GRPO = ("data.train_batch_size=64", "actor_rollout_ref.rollout.n=4", "trainer.v1.trainer_mode=separate_async")
QUEUE = "trainer.v1.separate_async.reward_queue"


def test_the_yaml_defaults_are_those_of_the_options() -> None:
    config = settled()
    assert resolved("trainer.v1.trainer_mode=reward_pipeline").mode.pipeline == PipelineOptions()
    # Hydra takes options without a plus sign only if they are there.
    assert config.trainer.v1.reward_pipeline.keys() == PipelineOptions.model_fields.keys()
    assert config.trainer.v1.separate_async.reward_queue.keys() == RewardQueueOptions.model_fields.keys()


def test_which_option_bounds_the_wait() -> None:
    pipeline, separate = "trainer.v1.reward_pipeline", "trainer.v1.separate_async.reward_queue"
    mode = "trainer.v1.trainer_mode"
    settings = resolved(f"{mode}=reward_pipeline", f"{pipeline}.stall_timeout_s=5")
    assert settings.mode.stall_timeout == (5, f"{pipeline}.stall_timeout_s")
    settings = resolved(f"{mode}=separate_async", f"{separate}.stall_timeout_s=7")
    assert settings.mode.stall_timeout == (7, f"{separate}.stall_timeout_s")
    assert resolved().mode.stall_timeout[0] is None


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


def test_without_a_queue() -> None:
    override = f"{QUEUE}.enabled=False"
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"
    assert resolved(*GRPO, override, own).mode.queue is None
    assert resolved(*GRPO, override).mode.queue is None
    assert resolved().mode.queue is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{QUEUE}.capacity=31"], r"capacity=31: .*at least 32, .*rollout\.n=4.* 8 agent loop workers"),
        ([f"{QUEUE}.in_flight=7"], r"in_flight=7: .*at least 8, one rollout for each"),
        ([f"{QUEUE}.in_flight=0"], rf"{QUEUE}\.in_flight"),
        ([f"+{QUEUE}.size=9"], rf"{QUEUE}\.size"),
        (["+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"], rf"my\.Manager .*{QUEUE}\.enabled"),
    ],
)
def test_a_queue_that_could_not_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(*GRPO, *overrides)


def test_the_polling_interval_is_an_option() -> None:
    config = settled()
    assert read_mode(config).poll_interval_s == 0.1
    for interval in (2, 0.5):
        config.trainer.v1.sampler.poll_interval_s = interval
        assert read_mode(config).poll_interval_s == interval
    for wrong in (0, -1, "soon", True, None):
        config.trainer.v1.sampler.poll_interval_s = wrong
        with pytest.raises(ConfigError, match=r"trainer\.v1\.sampler\.poll_interval_s: Input should be "):
            read_mode(config)
    del config.trainer.v1.sampler.poll_interval_s
    assert read_mode(config).poll_interval_s == 0.1


def test_the_number_of_judged_rollouts_has_no_bound_if_a_manager_needs_whole_groups() -> None:
    for mode in (resolved().mode, resolved(*GRPO).mode):
        check_group_manager(mode)
    with pytest.raises(ConfigError, match=r"in_flight=8 does not work with a reward manager that waits .*limits"):
        check_group_manager(resolved(*GRPO, f"{QUEUE}.in_flight=8").mode)
