"""The schedule of a step in the mode ``reward_pipeline``, from verl's configuration. Does not import verl."""

from __future__ import annotations

import logging
import math

from omegaconf import DictConfig

from reward_loop.agent.schedule import Schedule
from reward_loop.verl.mode_options import PipelineOptions

__all__ = ["MINI_BATCH_ESTIMATORS", "make_schedule", "mini_batch_groups"]

logger = logging.getLogger(__name__)

MINI_BATCH_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"})
"""Advantage estimators that use only the samples of one group. The others whiten advantages over the whole batch, or
count over it: ``gpg`` counts the non-zero scores."""


def mini_batch_groups(config: DictConfig, *, critic: bool) -> int:
    """Returns the number of groups in a mini-batch: the least common multiple of the actor's and the critic's sizes."""
    sizes = [config.actor_rollout_ref.actor.ppo_mini_batch_size]
    if critic:
        sizes.append(config.critic.ppo_mini_batch_size)
    return math.lcm(*sizes)


def make_schedule(config: DictConfig, options: PipelineOptions, groups: int) -> Schedule:
    """Returns the schedule of every step of a run. ``groups`` is the number of groups in a mini-batch."""
    by_mini_batch = options.mini_batch_pipeline
    estimator = config.algorithm.adv_estimator
    if by_mini_batch and estimator not in MINI_BATCH_ESTIMATORS:
        logger.warning(
            "trainer.v1.reward_pipeline.mini_batch_pipeline has no effect with algorithm.adv_estimator=%s, which uses "
            "the whole batch: an update waits for all rewards. Estimators that work by mini-batch: %s",
            estimator,
            ", ".join(sorted(MINI_BATCH_ESTIMATORS)),
        )
        by_mini_batch = False
    count = math.ceil(config.data.train_batch_size / groups) if by_mini_batch else 1
    return Schedule(count, by_mini_batch, options.one_step_off_policy)
