"""The group of reward workers, on all nodes, as the trainer uses it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from reward_loop.errors import RewardLoopError
from reward_loop.types import Reward, RewardSample
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.run.services import worker_nodes
from reward_loop.verl.workers.reward_client import MAX_TASK_RETRIES, RewardClient, name_of, prompt_of
from reward_loop.verl.workers.reward_worker import RewardWorker

T = TypeVar("T")

BUSY_S = 5.0
"""The longest wait for busy workers to stop, in seconds."""

CHECK_S = 60.0
"""The longest wait for the rewards of a batch between two checks for fatal errors, in seconds."""


def _in_group(sample: Any, size: int) -> Any:
    """Return a sample with the number of rollouts of its prompt, for managers that need the whole group."""
    if isinstance(sample, RewardSample):
        return replace(sample, group_size=size)
    sample.non_tensor_batch["group_size"] = np.array([size] * len(sample), dtype=object)
    return sample


class RewardWorkers:
    """Starts the reward workers, distributed over all nodes, and scores batches with them.

    Ray restarts a worker that dies, on another node if its node is lost. Calls without an answer are sent again, up to
    `MAX_TASK_RETRIES` times each: samples by the client when the worker is reachable again, other calls by Ray.

    Args:
        settings: the settings of rewards.
        router: the ``host:port`` of the router in front of the reward models; ``None`` without a reward model.
        job: what is true of the whole job.
    """

    def __init__(self, settings: RewardSettings, router: str | None, job: RunningJob) -> None:
        actor = ray.remote(RewardWorker)
        nodes = worker_nodes(settings.num_workers)
        self.handles = [
            actor.options(
                # Without a bound, which a long run could reach. `MAX_TASK_RETRIES` bounds those that one sample causes.
                max_restarts=-1,
                max_task_retries=MAX_TASK_RETRIES,
                # Ray's default of 1,000 would make further samples wait in Ray, without a limit or a deadline of ours.
                max_concurrency=100_000,
                # Soft: if the node is lost, Ray restarts the worker on another one.
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node_id=node, soft=True
                ),
            ).remote(settings, router, nodes.count(node), job.name, name_of(number))
            for number, node in enumerate(nodes)
        ]
        self.client = RewardClient(self.handles, settings.options, job.handle)
        self._job = job
        self._stall_timeout_s = settings.mode.sampler.stall_timeout_s

    def wait_until_ready(self) -> None:
        """Wait until every worker has loaded the tokenizer and the user's function.

        Raises:
            RewardLoopError: a worker failed to start, or did not start in time.
        """
        self.client.by_group = any(self._need_groups("worker_start_timeout_s"))

    def stop(self) -> None:
        """Stop scoring at the end of training, see `RewardWorker.stop`.

        Waits at most `BUSY_S` seconds: a worker that blocks its event loop ends with the run.
        """
        ray.wait([worker.stop.remote() for worker in self.handles], num_returns=len(self.handles), timeout=BUSY_S)

    def score_batch(self, rows: Sequence[Any]) -> list[Reward]:
        """Score a batch, and return the rewards in the order of its rows.

        Args:
            rows: the rollouts, from `read_sessions`. If the manager needs whole groups, all rollouts of each prompt.
                Those that failed are not awaited: the others are the group.

        Raises:
            RewardLoopError: the run must stop; no reward arrived for too long; or a worker does not respond.
        """
        if self.client.by_group:
            sizes = Counter(map(prompt_of, rows))
            rows = [_in_group(row, sizes[prompt_of(row)]) for row in rows]
        return self._results([self.client.reward_of(row) for row in rows])

    def _results(self, pending: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for calls of workers, and return their results."""
        try:
            # The trainer's thread has no event loop.
            return asyncio.run(self._gather(pending))
        except RayTaskError as error:
            self._job.check()  # first the error that names the sample and the cause
            raise RewardLoopError(f"a reward worker failed: {error}") from error

    async def _gather(self, pending: Sequence[Awaitable[T]]) -> list[T]:
        """Fail if no result arrives for longer than ``trainer.v1.sampler.stall_timeout_s``."""
        calls = [asyncio.ensure_future(call) for call in pending]
        left, last_arrival = set(calls), time.monotonic()
        while left:
            done, left = await asyncio.wait(left, timeout=min(self.client.options.worker_answer_timeout_s, CHECK_S))
            quiet = time.monotonic() - last_arrival
            if done:
                last_arrival += quiet
            elif left:
                self._job.check()
                self._need_groups()  # all workers must respond
                if self._stall_timeout_s is not None and quiet > self._stall_timeout_s:
                    raise RewardLoopError(
                        f"{len(left)} of {len(calls)} rewards are missing, and none arrived for {quiet:.0f} s "
                        f"(trainer.v1.sampler.stall_timeout_s={self._stall_timeout_s:g}): does the reward manager wait "
                        "without a deadline?"
                    )
        return await asyncio.gather(*calls)

    def _need_groups(self, option: str = "worker_answer_timeout_s") -> list[bool]:
        """Ask all workers whether one of them must receive all samples of a prompt.

        Args:
            option: the name of the option with the timeout.

        Raises:
            RewardLoopError: a worker did not start, or did not answer in time.
        """
        timeout: float = getattr(self.client.options, option)
        deadline = time.monotonic() + timeout
        while True:
            asked = [worker.needs_group.remote() for worker in self.handles]
            try:
                return ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
            except ActorUnavailableError as error:
                if time.monotonic() < deadline:
                    continue  # its node may be lost, and Ray has not detected it yet
                cause: Exception = error
            except RayActorError as error:
                raise RewardLoopError(f"a reward worker did not start: {error}") from error
            except ray.exceptions.GetTimeoutError as error:
                cause = error
            raise RewardLoopError(
                f"a reward worker did not answer within {timeout:g} s (reward_loop.{option}): raise it for a slow "
                "shared file system; otherwise, does the reward function or its manager block the event loop?"
            ) from cause
