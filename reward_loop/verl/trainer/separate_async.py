"""verl's trainer mode ``separate_async`` with a bounded queue between generation and judging.

verl starts all submitted rollouts at once, and judges each as soon as it is generated. Here, the rollouts of a prompt
start only when the queue has room for them, and are judged in the order in which they were generated. Rollouts in the
queue count as submitted, so verl's bounds on staleness include them.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import ray
from omegaconf import OmegaConf
from typing_extensions import override
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from reward_loop.agent import Places, QueueCounts, RewardQueue, queue_metrics
from reward_loop.config import parse
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.verl.options import REWARD_QUEUE, RewardQueueOptions, queue_shares
from reward_loop.verl.workers.agent_loop import RewardAgentLoopManager, RewardAgentLoopWorker

QUEUE_AGENT_LOOP_MANAGER = "reward_loop.verl.trainer.separate_async.QueueAgentLoopManager"
"""The agent loop manager that puts a queue between generation and judging."""

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Timeout in seconds for the answers of agent loop workers."""


_places: ContextVar[Places] = ContextVar("places")
"""The places of the prompt of the current task."""


class QueueAgentLoopWorker(RewardAgentLoopWorker):
    """An agent loop worker with its share of the queue. A Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = parse(RewardQueueOptions, OmegaConf.select(self.config, REWARD_QUEUE), REWARD_QUEUE)
        capacity, in_flight = queue_shares(self.config, options)
        self._queue = RewardQueue(capacity, in_flight)

    async def queue_counts(self) -> QueueCounts:
        """Return the queue's counts since the last call."""
        return self._queue.take_counts()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        count = prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        async with self._queue.reserve(int(count)) as places:
            _places.set(places)  # verl has a task for each prompt, and the tasks of its sessions inherit it
            await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        return None

    async def _judge(self, session: Any, outputs: list[Any], kwargs: dict) -> None:
        if (places := _places.get(None)) is None:  # of a validation
            return await super()._judge(session, outputs, kwargs)
        async with places.judging(step=_version(outputs, kwargs)) as end:
            # A rollout that waits for others of its prompt is not judged any more: they may need its place.
            CALLER.set(Caller(release=end))
            await super()._judge(session, outputs, kwargs)
        return None


def _version(outputs: list[Any], kwargs: dict) -> int:
    """Return the oldest version of the weights that generated a rollout.

    If the server does not report versions, returns the version at submission.
    """
    versions = [output.extra_fields.get("min_global_steps") for output in outputs]
    return min((version for version in versions if version is not None), default=int(kwargs["global_steps"]) - 1)


class QueueAgentLoopManager(RewardAgentLoopManager):
    """verl's agent loop manager, with :class:`QueueAgentLoopWorker` as its workers."""

    worker_class = QueueAgentLoopWorker


class QueueSeparateAsyncTrainer(PPOTrainerSeparateAsync):
    """verl's trainer for separate devices. It also logs the queue's metrics."""

    @override
    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        requests = [worker.queue_counts.remote() for worker in self.agent_loop_manager.agent_loop_workers]
        answered, missing = ray.wait(requests, num_returns=len(requests), timeout=ANSWER_S)
        if missing:
            logger.warning(
                "%d of %d agent loop workers did not answer within %g s", len(missing), len(requests), ANSWER_S
            )
        # The rollout has the weights of this step now. `parameter_sync_step` updates lie between two versions.
        updates = self.config.trainer.v1.separate_async.parameter_sync_step
        metrics.update(queue_metrics(ray.get(answered), self.global_steps, updates))
