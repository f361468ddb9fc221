"""The options of the trainer modes that overlap judging with the rest, and what these modes cannot do.

Does not import verl.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from reward_loop.agent.schedule import Schedule
from reward_loop.config import Config, parse
from reward_loop.errors import ConfigError

logger = logging.getLogger(__name__)

PIPELINE_MODE = "reward_pipeline"
"""The name of our trainer mode, as in ``trainer.v1.trainer_mode=reward_pipeline``."""

REWARD_QUEUE = "trainer.v1.separate_async.reward_queue"
"""The options of the queue between generation and judging."""

MINI_BATCH_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"})
"""Advantage estimators that use only the samples of one group. The others whiten advantages over the whole batch, or
count over it: ``gpg`` counts the non-zero scores."""


class SamplerOptions(Config):
    """``trainer.v1.sampler``, which also has options of verl."""

    # verl polls every 2 s, which is a large part of a short step.
    poll_interval_s: float = Field(default=0.1, gt=0, allow_inf_nan=False, strict=True)
    """Seconds between two polls of verl's replay buffer for finished rollouts."""


class PipelineOptions(Config):
    """``trainer.v1.reward_pipeline``."""

    mini_batch_pipeline: bool = True
    """Update on every mini-batch of groups as soon as its rewards have arrived."""

    one_step_off_policy: bool = True
    """Generate the next step's rollouts before this step's update."""

    order: Literal["arrival", "submission"] = "arrival"
    """Which groups `mini_batch_pipeline` trains on first. `arrival`: the groups whose rewards arrive first.
    `submission`: the order of the prompts in the batch; a mini-batch waits for its own groups."""

    max_ahead: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """With `algorithm.filter_groups`: at most this many times `data.train_batch_size` prompts are begun because the
    filter will probably remove others, as it did in the last steps. What a step does not need belongs to the next one.
    `0`: groups are replaced only after they are filtered."""

    max_refills: int | None = Field(default=16, ge=1)
    """With `trainer.v1.sampler.sync_refill_failed_groups`: the run stops when failed groups were replaced, and all
    replacements failed too, more than this many times in a row; `null` for no limit."""

    stall_timeout_s: float | None = Field(default=3600.0, gt=0)
    """The run stops when the trainer waits for this many seconds without progress: no prompt's generation has ended,
    and no reward was requested or has arrived; `null` for no limit."""


class RewardQueueOptions(Config):
    """``trainer.v1.separate_async.reward_queue``."""

    enabled: bool = True
    """Whether there is a queue between generation and judging in the mode `separate_async`."""

    capacity: int | None = Field(default=None, ge=1)
    """The largest number of rollouts that are being generated or wait for a judge. A prompt's rollouts start only when
    there is room for all of them. By default the number that verl has in flight: a training step's rollouts, and those
    of `num_warmup_batches`."""

    in_flight: int | None = Field(default=None, ge=1)
    """The largest number of rollouts that are judged at the same time, oldest first; the others wait in the queue. By
    default the rollouts of a training step. A reward manager that waits for all rollouts of a prompt has no limit."""

    max_refills: int | None = Field(default=16, ge=1)
    """The run stops when more groups than those of this many training steps have failed in a row; `null` for no
    limit."""

    stall_timeout_s: float | None = Field(default=3600.0, gt=0)
    """The run stops when training or validation waits for this many seconds without progress: no prompt has started or
    ended, and no reward has arrived; `null` for no limit."""


@dataclass(frozen=True, slots=True)
class ModeOptions:
    """The options of a run's trainer mode."""

    name: str
    """``trainer.v1.trainer_mode``."""
    poll_interval_s: float
    """Seconds between two polls of verl's replay buffer."""
    pipeline: PipelineOptions | None = None
    """The options of the mode `reward_pipeline`; ``None`` in other modes."""
    queue: RewardQueueOptions | None = None
    """The options of the queue between generation and judging; ``None`` without a queue."""

    @property
    def stall_timeout(self) -> tuple[float | None, str]:
        """The seconds without progress after which a wait of verl's replay buffer fails, and the name of the option."""
        if self.pipeline is not None:
            return self.pipeline.stall_timeout_s, f"trainer.v1.{PIPELINE_MODE}.stall_timeout_s"
        return self.queue.stall_timeout_s if self.queue is not None else None, f"{REWARD_QUEUE}.stall_timeout_s"


def read_mode(config: DictConfig) -> ModeOptions:
    """Return the options of the trainer mode.

    Raises:
        ConfigError: an option is malformed; the message names it.
    """
    name = config.trainer.v1.trainer_mode
    pipeline = queue = None
    if name == PIPELINE_MODE:
        pipeline = parse(PipelineOptions, config.trainer.v1.get(PIPELINE_MODE), f"trainer.v1.{PIPELINE_MODE}")
    if name == "separate_async":
        queue = parse(RewardQueueOptions, OmegaConf.select(config, REWARD_QUEUE), REWARD_QUEUE)
        if not queue.enabled:
            queue = None
    # The group also has verl's own options.
    given = {key: value for key, value in config.trainer.v1.sampler.items() if key in SamplerOptions.model_fields}
    sampler = parse(SamplerOptions, given, "trainer.v1.sampler")
    return ModeOptions(name, sampler.poll_interval_s, pipeline, queue)


def mini_batch_groups(config: DictConfig, *, critic: bool) -> int:
    """Return the number of groups in a mini-batch: the least common multiple of the actor's and the critic's sizes."""
    sizes = [config.actor_rollout_ref.actor.ppo_mini_batch_size]
    if critic:
        sizes.append(config.critic.ppo_mini_batch_size)
    return math.lcm(*sizes)


def make_schedule(config: DictConfig, options: PipelineOptions, groups: int) -> Schedule:
    """Return the schedule of every step of a run. ``groups`` is the number of groups in a mini-batch."""
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


def queue_shares(config: DictConfig, options: RewardQueueOptions) -> tuple[int, int]:
    """Return each agent loop worker's share of the queue: its capacity, and how many rollouts are judged at once."""
    rollout = config.actor_rollout_ref.rollout
    workers, batch_size = rollout.agent.num_workers, config.data.train_batch_size
    # Rounded up, as `chunk` does, by which prompts are divided among the workers.
    of_a_step = math.ceil(batch_size / workers) * rollout.n
    of_warmup = math.ceil(batch_size * config.trainer.v1.separate_async.num_warmup_batches / workers) * rollout.n
    # The user's numbers are rounded down, so that all workers together stay within them.
    return (
        of_a_step + of_warmup if options.capacity is None else options.capacity // workers,
        of_a_step if options.in_flight is None else options.in_flight // workers,
    )


def check_mode(config: DictConfig, mode: ModeOptions) -> None:
    """Reject options of verl that do not work with the trainer mode.

    Raises:
        ConfigError: an option contradicts the mode; the message names it and what to set instead.
    """
    if mode.pipeline is not None:
        _check_pipeline(config)
    if mode.queue is not None:
        _check_queue(config, mode.queue)


def check_group_manager(mode: ModeOptions) -> None:
    """Reject options that do not work with a reward manager that waits for all rollouts of a prompt.

    Raises:
        ConfigError: the queue between generation and judging has an ``in_flight``.
    """
    in_flight = mode.queue.in_flight if mode.queue is not None else None
    if in_flight is not None:
        raise ConfigError(
            f"{REWARD_QUEUE}.in_flight={in_flight} does not work with a reward manager that waits for all rollouts of "
            "a prompt: leave it out, and bound the judges by reward_loop.limits"
        )


def _check_pipeline(config: DictConfig) -> None:
    sampler = config.trainer.v1.sampler.get("custom_sampler") or {}
    rejected = {
        "skip.rollout_tq.enable=True": (OmegaConf.select(config, "skip.rollout_tq.enable"), "set it to False"),
        f"trainer.v1.sampler.custom_sampler.path={sampler.get('path')}": (sampler.get("path"), "leave it out"),
    }
    for what, (given, fix) in rejected.items():
        if given:
            raise ConfigError(f"trainer.v1.trainer_mode={PIPELINE_MODE} does not work with {what}: {fix}")


def _check_queue(config: DictConfig, options: RewardQueueOptions) -> None:
    rollout = config.actor_rollout_ref.rollout
    workers = rollout.agent.num_workers
    if options.capacity is not None and options.capacity < workers * rollout.n:
        raise ConfigError(
            f"{REWARD_QUEUE}.capacity={options.capacity}: it must be at least {workers * rollout.n}, the rollouts of "
            f"one prompt (actor_rollout_ref.rollout.n={rollout.n}) for each of the {workers} agent loop workers "
            "(actor_rollout_ref.rollout.agent.num_workers)"
        )
    if options.in_flight is not None and options.in_flight < workers:
        raise ConfigError(
            f"{REWARD_QUEUE}.in_flight={options.in_flight}: it must be at least {workers}, one rollout for each of the "
            "agent loop workers (actor_rollout_ref.rollout.agent.num_workers)"
        )
    manager = rollout.agent.get("agent_loop_manager_class")
    if manager is not None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager} does not work with the reward queue: "
            f"leave it out, or set {REWARD_QUEUE}.enabled=False"
        )
