"""verl's trainer mode ``separate_async`` with a bounded queue between generation and judging.

verl starts all submitted rollouts at once, and judges each as soon as it is generated. Here, the rollouts of a prompt
start only when the queue has room for them, and are judged in the order in which they were generated. Rollouts in the
queue count as submitted, so verl's bounds on staleness include them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any

import ray
from ray.exceptions import RayActorError
from typing_extensions import override
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from reward_loop.agent import RewardQueue
from reward_loop.agent.queue import QueueEntry
from reward_loop.types import Outcome
from reward_loop.verl.agent_loop import RewardAgentLoopWorker
from reward_loop.verl.agent_loop_manager import RewardAgentLoopManager
from reward_loop.verl.options import queue_shares, read_mode

QUEUE_AGENT_LOOP_MANAGER = "reward_loop.verl.separate_async.QueueAgentLoopManager"
"""The agent loop manager that puts a queue between generation and judging."""

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Timeout in seconds for the answers of agent loop workers."""


class QueueAgentLoopWorker(RewardAgentLoopWorker):
    """An agent loop worker with its share of the queue. A Ray actor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = read_mode(self.config).queue
        assert options is not None
        capacity, in_flight = queue_shares(self.config, options)
        self._by_group = any(client.by_group for client in self.reward_loop_worker_handles)
        # With a bound, the rollouts that are judged could wait for others of their prompt, which wait for their turn.
        self._queue = JudgingQueue(capacity, None if self._by_group else in_flight)
        self._reservations: dict[str, Reservation] = {}
        self._step = 0
        """The next training step."""

    async def start_step(self, step: int) -> None:
        """Set the number of the next training step."""
        self._step = step

    async def queue_metrics(self, step: int) -> dict[str, float]:
        """Return the queue's metrics since the last call.

        Args:
            step: the version of the current weights. ``parameter_sync_step`` updates lie between two versions.
        """
        metrics = self._queue.metrics(step, self.config.trainer.v1.separate_async.parameter_sync_step)
        self._queue.queue.start_step()
        return metrics

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            return await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
        uid, count = prompt["uid"], prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.n)
        async with self._queue.reserve(int(count)) as reservation:
            self._reservations[uid] = reservation
            try:
                await super()._run_prompt(prompt, sampling_params, trajectory=trajectory, trace=trace)
            finally:
                del self._reservations[uid]
        return None

    async def _judge(self, times: dict[str, float], outputs: list[Any], kwargs: dict, **options: Any) -> None:
        reservation = self._reservations.get(kwargs["uid"])  # validation samples have none
        if reservation is None:
            return await super()._judge(times, outputs, kwargs, **options)
        async with self._queue.turn(reservation, step=_version(outputs, kwargs)):
            # A manager that waits for all rollouts of a prompt must receive either all of them or none.
            partly_judged = self._by_group and reservation.judged
            if self._will_be_evicted(int(kwargs["global_steps"])) and not partly_judged:
                _leave_unscored(outputs[-1])
            else:
                reservation.judged = True
                await super()._judge(times, outputs, kwargs, **options)
        return None

    def _will_be_evicted(self, prompt_step: int) -> bool:
        """Return whether verl's replay buffer will evict the rollouts of a prompt of step ``prompt_step``."""
        sampler = self.config.trainer.v1.sampler
        threshold = sampler.max_off_policy_threshold
        return (
            sampler.max_off_policy_strategy == "drop"
            and threshold is not None
            and self._step - prompt_step + 1 > threshold
        )


def _leave_unscored(output: Any) -> None:
    """Mark a rollout as unscored without judging it. It is masked, in case the replay buffer keeps it."""
    output.reward_score = 0.0
    output.extra_fields["reward_extra_info"] = {
        "reward_outcome": str(Outcome.UNSCORED),
        "reward_masked": True,
        "reward_error": "not judged: older than trainer.v1.sampler.max_off_policy_threshold allows",
        "reward_cause": "too old",
    }


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

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all agent loop workers, and return the answers that arrive within `ANSWER_S` seconds."""
        requests = [getattr(w, method).remote(*arguments) for w in self.agent_loop_manager.agent_loop_workers]
        answered, missing = ray.wait(requests, num_returns=len(requests), timeout=ANSWER_S)
        answers = []
        for answer in answered:
            with suppress(RayActorError):  # a dead worker ends the run at the next poll
                answers.append(ray.get(answer))
        if missing:
            logger.warning(
                "%d of %d agent loop workers did not answer within %g s", len(missing), len(requests), ANSWER_S
            )
        return answers

    @override
    def on_step_end(self) -> None:
        """Send new weights to the rollout, and the number of the next step to the agent loop workers."""
        super().on_step_end()
        for worker in self.agent_loop_manager.agent_loop_workers:
            # Not awaited: a worker that misses it only judges rollouts that will be evicted.
            worker.start_step.remote(self.global_steps + 1)

    @override
    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        # The rollout has the weights of this step now.
        if queues := self._ask("queue_metrics", self.global_steps):
            metrics.update(merge_metrics(queues))


_LARGEST = {f"reward_queue/{name}" for name in ("oldest_s", "staleness_max", "all_staleness_max")}
_MEANS = {
    "reward_queue/staleness_mean": ("reward_queue/size",),
    "reward_queue/all_staleness_mean": ("reward_queue/size", "reward_queue/judging"),
}
"""Name of a mean -> the metrics whose sum is the number of rollouts in that mean."""


class Reservation:
    """Places in the queue for the rollouts of a prompt, reserved before the rollouts are generated."""

    def __init__(self, count: int) -> None:
        self.left = count
        """The number of places that have not been used."""
        self.judged = False
        """Whether judging of any rollout of the prompt has started."""


class JudgingQueue:
    """A `RewardQueue` with places reserved before generation, and a bound on the rollouts that are judged concurrently.

    Args:
        capacity: the largest number of rollouts that are being generated or wait for a judge.
        in_flight: the largest number of rollouts that are judged at the same time; ``None`` for no bound.
    """

    def __init__(self, capacity: int, in_flight: int | None) -> None:
        self.queue = RewardQueue(capacity)
        self._turns: AbstractAsyncContextManager[Any] = nullcontext()
        if in_flight is not None:
            self._turns = asyncio.Semaphore(in_flight)
        self._judging: set[QueueEntry] = set()

    @asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[Reservation]:
        """Wait until the queue has ``count`` free places, and reserve them. Releases the unused ones at the end."""
        await self.queue.reserve(count)
        reservation = Reservation(count)
        try:
            yield reservation
        finally:
            self.queue.release(reservation.left)
            reservation.left = 0

    @asynccontextmanager
    async def turn(self, reservation: Reservation, *, step: int) -> AsyncIterator[None]:
        """Put a rollout into the queue, and wait for its turn. The body of the block must judge the rollout.

        Uses one place of the reservation. ``step`` is the version of the weights that generated the rollout.
        """
        reservation.left -= 1
        entry = self.queue.put_reserved(None, step=step)
        try:
            # The semaphore and the queue are both first in, first out, so each caller takes its own entry.
            async with self._turns:
                self.queue.get_nowait()
                self._judging.add(entry)
                yield
        finally:
            if entry in self._judging:
                self._judging.remove(entry)
            else:  # cancelled before its turn
                self.queue.withdraw(entry)

    def metrics(self, current_step: int, updates_per_step: int = 1) -> dict[str, float]:
        """Return the metrics of the queue, and of all generated rollouts that have no reward yet, by name.

        Args:
            current_step: the version of the current weights.
            updates_per_step: the number of updates between two versions of the weights. Staleness counts updates.
        """
        metrics = self.queue.metrics(current_step, self._judging)
        for name in metrics:
            if "staleness" in name:
                metrics[name] *= updates_per_step
        return {**metrics, "reward_queue/judging": len(self._judging)}


def merge_metrics(queues: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of several queues into those of one queue.

    ``largest_size`` becomes an upper bound: the sum of the largest sizes, which may occur at different times.
    """
    merged = {}
    for name in queues[0]:
        values = [metrics[name] for metrics in queues]
        if name in _LARGEST:
            merged[name] = max(values)
        elif name in _MEANS:
            counts = [sum(metrics[of] for of in _MEANS[name]) for metrics in queues]
            total = sum(counts)
            merged[name] = sum(v * c for v, c in zip(values, counts, strict=True)) / total if total else 0.0
        else:
            merged[name] = sum(values)
    return merged
