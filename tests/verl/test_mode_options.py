"""The options of the trainer modes, and what the modes cannot do."""

from __future__ import annotations

import pytest

from reward_loop.errors import ConfigError
from reward_loop.verl.mode_options import (
    PipelineOptions,
    RewardQueueOptions,
    check_mode,
    has_reward_queue,
    pipeline_options,
    poll_interval,
    queue_shares,
    reward_queue_options,
    stall_timeout,
)
from tests.verl.configs import settled

GRPO = ("data.train_batch_size=64", "actor_rollout_ref.rollout.n=4", "trainer.v1.trainer_mode=separate_async")
QUEUE = "trainer.v1.separate_async.reward_queue"


def test_the_yaml_defaults_are_those_of_the_options() -> None:
    config = settled()
    assert pipeline_options(config) == PipelineOptions()
    # Hydra takes options without a plus sign only if they are there.
    assert config.trainer.v1.reward_pipeline.keys() == PipelineOptions.model_fields.keys()
    assert config.trainer.v1.separate_async.reward_queue.keys() == RewardQueueOptions.model_fields.keys()


def test_which_option_bounds_the_wait() -> None:
    pipeline, separate = "trainer.v1.reward_pipeline", "trainer.v1.separate_async.reward_queue"
    mode = "trainer.v1.trainer_mode"
    config = settled(f"{mode}=reward_pipeline", f"{pipeline}.stall_timeout_s=5")
    assert stall_timeout(config) == (5, f"{pipeline}.stall_timeout_s")
    config = settled(f"{mode}=separate_async", f"{separate}.stall_timeout_s=7")
    assert stall_timeout(config) == (7, f"{separate}.stall_timeout_s")
    assert stall_timeout(settled())[0] is None


def test_agent_loop_workers_share_the_queue() -> None:
    workers = "actor_rollout_ref.rollout.agent.num_workers"
    config = settled(*GRPO)
    assert has_reward_queue(config)
    assert reward_queue_options(config) == RewardQueueOptions()
    # 64 prompts and as many to warm up, of 4 rollouts, for 8 workers.
    assert queue_shares(config) == (64, 32)
    assert queue_shares(settled(*GRPO, f"{workers}=3", "trainer.v1.separate_async.num_warmup_batches=0.5")) == (132, 88)
    assert queue_shares(settled(*GRPO, f"{QUEUE}.capacity=100", f"{QUEUE}.in_flight=20")) == (12, 2)


@pytest.mark.parametrize("override", [f"{QUEUE}.enabled=False", "reward_model.use_reward_loop=False"])
def test_without_a_queue(override: str) -> None:
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=my.Manager"
    assert not has_reward_queue(settled(*GRPO, override, own))
    assert not has_reward_queue(settled(*GRPO, override))
    assert not has_reward_queue(settled())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{QUEUE}.capacity=31"], r"capacity=31: at least 32, .*rollout\.n=4.* 8 agent loop workers"),
        ([f"{QUEUE}.in_flight=7"], r"in_flight=7: at least 8, one for each"),
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
    assert poll_interval(config) == 0.2
    for interval in (2, 0.5):
        config.trainer.v1.sampler.poll_interval_s = interval
        assert poll_interval(config) == interval
    for wrong in (0, -1, "soon", True, None):
        config.trainer.v1.sampler.poll_interval_s = wrong
        with pytest.raises(ConfigError, match=r"trainer\.v1\.sampler\.poll_interval_s=.*positive number"):
            check_mode(config)
    del config.trainer.v1.sampler.poll_interval_s
    assert poll_interval(config) == 0.2
