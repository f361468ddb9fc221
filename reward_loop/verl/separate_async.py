"""verl's trainer mode ``separate_async`` with a bounded queue between generation and judging.

verl starts all rollouts that it is given at once, and hands each to its judge when it is generated. Here, a prompt's
rollouts begin when there is room for them in the queue, and leave it for the judges in the order in which they were
generated. What waits has been handed to the rollout, so that verl counts it in its bounds on staleness.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.verl.judging_queue import JudgingQueue, Places, merge_metrics
from reward_loop.verl.mode_options import REWARD_QUEUE, queue_shares, reward_queue_options
from reward_loop.verl.progress import Losses
from reward_loop.verl.replay_buffer import Patience

__all__ = [
    "QUEUE_AGENT_LOOP_MANAGER",
    "QueueAgentLoopManager",
    "QueueAgentLoopWorker",
    "QueueSeparateAsyncTrainer",
]

QUEUE_AGENT_LOOP_MANAGER = "reward_loop.verl.separate_async.QueueAgentLoopManager"
"""What puts a queue between generation and judging."""

ANSWER_S = 60.0
"""Seconds that an agent loop worker has to say how full its queue is."""


class QueueAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Holds its share of the queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        capacity, in_flight = queue_shares(self.config)
        by_group = any(client.by_group for client in self.reward_loop_worker_handles)
        self._queue = JudgingQueue(capacity, None if by_group else in_flight)
        self._places: dict[str, Places] = {}
        self._failure = ""

    async def last_failure(self) -> str:
        """The latest session that failed, and why."""
        return self._failure

    async def queue_metrics(self, step: int) -> dict[str, float]:
        """The queue's figures since the last call, ``step`` being the version of the weights now."""
        metrics = self._queue.metrics(step)
        self._queue.queue.start_step()
        return metrics

    async def until_death(self) -> None:
        """Never returns: who waits for it learns of the worker's death."""
        await asyncio.Event().wait()

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        uid, count = prompt["uid"], prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        async with self._queue.places(int(count)) as places:
            self._places[uid] = places
            try:
                await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
            finally:
                del self._places[uid]
        return None

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, **kwargs: Any) -> Any:
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            self._failure = f"{kwargs['uid']}_{kwargs['session_id']}: {type(error).__name__}: {error}"
            raise

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        places = self._places.get(kwargs["uid"])
        if places is None:
            # Only training is judged beside generation: the limits of a service share their turns by this.
            return await super()._compute_score(outputs, {**kwargs, "__validate__": True})
        if outputs[-1].reward_score is not None:
            return await super()._compute_score(outputs, kwargs)
        async with self._queue.turn(places, step=_version(outputs, kwargs)):
            await super()._compute_score(outputs, kwargs)
        return None


def _version(outputs: list[Any], kwargs: dict) -> int:
    """The oldest weights that generated a rollout; where the server does not say, those of when it was asked for."""
    versions = [output.extra_fields.get("min_global_steps") for output in outputs]
    return min((version for version in versions if version is not None), default=int(kwargs["global_steps"]) - 1)


class QueueAgentLoopManager(AgentLoopManagerTQ):
    """Starts :class:`QueueAgentLoopWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(QueueAgentLoopWorker)


class QueueSeparateAsyncTrainer(PPOTrainerSeparateAsync):
    """verl's trainer for separate devices, which logs the queue."""

    def on_init_end(self) -> None:
        """Refuses what the queue cannot do, which is known when the reward workers have loaded their manager."""
        (client,) = self.get_reward_handles()
        in_flight = reward_queue_options(self.config).in_flight
        if client.by_group and in_flight is not None:
            raise ConfigError(
                f"{REWARD_QUEUE}.in_flight={in_flight} does not work with a reward manager that waits for all rollouts "
                "of a prompt: leave it out, and bound the judges by reward_loop.limits"
            )
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains."""
        self._agent_loop_workers = agent_loop_manager.agent_loop_workers
        self._deaths = [worker.until_death.remote() for worker in self._agent_loop_workers]
        super().fit(agent_loop_manager)

    def _build_replay_buffer(self) -> Any:
        """verl's buffer, with an eye on the agent loop workers, and on what it throws out."""
        buffer = super()._build_replay_buffer()
        Patience(buffer, self._raise_death)
        most = reward_queue_options(self.config).max_refills
        losses = Losses(None if most is None else most * self.config.data.train_batch_size)
        throw_out = buffer._evict_terminal_groups

        def throw_out_unless_all_fail(step: int, partition: str, reasons: Any) -> Any:
            if partition == "train" and losses.exhausted(len(reasons[2]), buffer.finished_keys[partition]):
                raise RewardLoopError(
                    f"{losses.in_a_row} groups failed one after the other, and what replaced them, too "
                    f"({REWARD_QUEUE}.max_refills={most}, times data.train_batch_size="
                    f"{self.config.data.train_batch_size}). {self._last_failure()}"
                )
            return throw_out(step, partition, reasons)

        buffer._evict_terminal_groups = throw_out_unless_all_fail
        return buffer

    def _last_failure(self) -> str:
        asked = [worker.last_failure.remote() for worker in self._agent_loop_workers]
        with suppress(RayError):  # GetTimeoutError is one
            for failure in ray.get(asked, timeout=ANSWER_S):
                if failure:
                    return f"A rollout that failed is {failure}"
        return "See the log of the agent loop workers"

    def _raise_death(self) -> None:
        dead, _ = ray.wait(self._deaths, timeout=0)
        if dead:
            who = f"agent loop worker {self._deaths.index(dead[0])} of {len(self._deaths)}"
            raise RewardLoopError(f"{who} is lost, and its rollouts with it")

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        # By now, the rollout has the weights of this step.
        answers = [worker.queue_metrics.remote(self.global_steps) for worker in self._agent_loop_workers]
        try:
            metrics.update(merge_metrics(ray.get(answers, timeout=ANSWER_S)))
        except RayActorError as error:
            raise RewardLoopError(f"an agent loop worker is lost, and its rollouts with it: {error}") from error
        except GetTimeoutError as error:
            raise RewardLoopError(f"an agent loop worker gave no sign of life for {ANSWER_S:.0f} s") from error
