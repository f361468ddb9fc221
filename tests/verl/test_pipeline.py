"""The trainer mode ``reward_pipeline``, in real steps of verl's trainer on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_loop.errors import ConfigError
from tests.verl import rewards
from tests.verl.checks import expected_advantages, signature
from tests.verl.configs import configuration, settled
from tests.verl.runs import Run, train

MODE = "trainer.v1.trainer_mode=reward_pipeline"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_generative_model: Path) -> Run:
    """Both overlaps, four mini-batches a step, and a judge that takes its time."""
    return train(
        tmp_path_factory.mktemp("pipeline"),
        tiny_generative_model,
        MODE,
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        function="Slow",
    )


@pytest.mark.integration
def test_every_sample_is_scored_and_trained_on_exactly_once(run: Run) -> None:
    assert run.returncode == 0, run.output[-5000:]
    seen = [row for step in range(1, 5) for row in run.rollouts(step)]
    assert len(seen) == 4 * 8 * 4
    assert len({row["uid"] for row in seen}) == len(seen)
    assert signature([call for call in run.calls if call["split"] == "train"]) == signature(seen)


@pytest.mark.integration
def test_the_advantage_is_that_of_the_returned_scores(run: Run) -> None:
    for step in range(1, 5):
        advantages = expected_advantages(run.rollouts(step))
        assert run.steps[step]["critic/advantages/max"] == pytest.approx(max(advantages), abs=1e-4)
        assert run.steps[step]["critic/advantages/min"] == pytest.approx(min(advantages), abs=1e-4)


@pytest.mark.integration
def test_it_is_off_policy_by_exactly_one_step(run: Run) -> None:
    assert [run.steps[step]["reward_pipeline/off_policy_steps"] for step in range(1, 5)] == [0, 1, 1, 1]


@pytest.mark.integration
def test_a_checkpoint_keeps_the_rollouts_that_wait_for_rewards(
    run: Run, tmp_path: Path, tiny_generative_model: Path
) -> None:
    resumed = train(
        tmp_path,
        tiny_generative_model,
        MODE,
        "trainer.total_training_steps=4",
        "trainer.val_before_train=False",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={run.directory}/checkpoints/global_step_2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        function="Slow",
    )
    assert resumed.returncode == 0, resumed.output[-5000:]
    assert sorted(resumed.steps) == [3, 4]
    for step in (3, 4):
        rollouts = resumed.rollouts(step)
        assert len(rollouts) == 8 * 4
        for row in rollouts:
            value = rewards.number(row["output"])
            assert row["score"] == pytest.approx((value % 100) / 100 if value % 7 > 1 else 0.0)
        advantages = expected_advantages(rollouts)
        assert resumed.steps[step]["critic/advantages/max"] == pytest.approx(max(advantages), abs=1e-4)
    # The prompts of step 3 were in the checkpoint; nothing was drawn from the data twice.
    assert signature_of_prompts(resumed, 3) == signature_of_prompts(run, 3)
    assert signature_of_prompts(resumed, 4) == signature_of_prompts(run, 4)


def signature_of_prompts(run: Run, step: int) -> list[str]:
    return sorted(row["input"] for row in run.rollouts(step))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("reward_model.use_reward_loop=False", "reward_model.use_reward_loop=False"),
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.enable=True"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=5", "actor_rollout_ref.actor.optim"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "actor_rollout_ref.actor.optim"),
        ("+trainer.v1.reward_pipeline.mini_batch=True", "trainer.v1.reward_pipeline.mini_batch"),
    ],
)
def test_what_does_not_work_in_this_mode_is_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        settled(MODE, override)


def test_the_mode_is_accepted_with_its_options() -> None:
    config = settled(MODE, "trainer.v1.reward_pipeline.one_step_off_policy=False")
    assert config.trainer.v1.reward_pipeline.mini_batch_pipeline is True
    written_as_in_the_recipe = settled("+mini_batch_pipeline=True").trainer.v1
    assert written_as_in_the_recipe.trainer_mode == "reward_pipeline"
    assert configuration().trainer.v1.trainer_mode == "sync"
