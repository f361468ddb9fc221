"""Which options the trainer mode ``reward_pipeline`` accepts."""

from __future__ import annotations

import pytest

from reward_loop.errors import ConfigError
from tests.verl.configs import configuration, settled

MODE = "trainer.v1.trainer_mode=reward_pipeline"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("skip.rollout_tq.enable=True", "skip.rollout_tq.enable=True"),
        ("trainer.v1.sampler.custom_sampler.path=mine.py", "trainer.v1.sampler.custom_sampler.path=mine.py"),
        ("trainer.v1.sampler.stall_timeout_s=0", "trainer.v1.sampler.stall_timeout_s"),
        ("+trainer.v1.reward_pipeline.mini_batch=True", "trainer.v1.reward_pipeline.mini_batch"),
    ],
)
def test_unsupported_options_of_the_mode_are_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        settled(MODE, override)


def test_the_mode_is_accepted_with_its_options() -> None:
    config = settled(MODE, "trainer.v1.reward_pipeline.one_step_off_policy=False")
    assert config.trainer.v1.reward_pipeline.mini_batch_pipeline is True
    written_as_in_the_recipe = settled("+mini_batch_pipeline=True").trainer.v1
    assert written_as_in_the_recipe.trainer_mode == "reward_pipeline"
    assert written_as_in_the_recipe.reward_pipeline.mini_batch_pipeline is True
    assert configuration().trainer.v1.trainer_mode == "sync"


def test_the_recipes_option_chooses_no_mode_that_was_not_asked_for() -> None:
    off = settled("+mini_batch_pipeline=False").trainer.v1
    assert (off.trainer_mode, off.reward_pipeline.mini_batch_pipeline) == ("sync", False)
    both = settled(MODE, "+mini_batch_pipeline=False").trainer.v1
    assert (both.trainer_mode, both.reward_pipeline.mini_batch_pipeline) == ("reward_pipeline", False)
    with pytest.raises(ConfigError, match=r"mini_batch_pipeline=True contradicts .*trainer_mode=separate_async"):
        settled("trainer.v1.trainer_mode=separate_async", "+mini_batch_pipeline=True")
