"""The reward worker: a Ray actor that scores verl's rollouts with one reward manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import ray

from reward_loop._util.process import freeze_and_raise_gc_threshold, raise_descriptor_limit
from reward_loop.errors import RewardLoopError
from reward_loop.limits import Limits, LocalLimits
from reward_loop.managers.base import open_records
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.types import Outcome, Reward, RewardSample
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.run.job import JobLimits
from reward_loop.verl.samples import VALIDATE
from reward_loop.verl.workers.managers import build_manager


class RewardWorker:
    """Scores samples with one reward manager. A Ray actor with asynchronous methods.

    Args:
        settings: the settings of rewards.
        router: the ``host:port`` of the router in front of the reward models; ``None`` without a reward model.
        workers_on_node: the number of reward workers on this worker's node, which share its cores; by default all
            workers of the run.
        job: the name of the job's actor; by default this worker is the whole job.
        name: the name of this worker in the job.
    """

    def __init__(
        self,
        settings: RewardSettings,
        router: str | None,
        workers_on_node: int | None = None,
        job: str | None = None,
        name: str = "reward worker",
    ) -> None:
        raise_descriptor_limit()  # a request in flight is an open connection, and so an open file
        self._options = settings.options
        records = open_records(self._options)
        take_counts = None if records is None else records.exchange_counts.take
        self._limits: Limits = LocalLimits(self._options)
        if job is not None:
            self._limits = JobLimits(ray.get_actor(job), name, self._options, take_counts)
        self._manager = build_manager(settings, router, self._limits, workers_on_node or settings.num_workers)
        self._running: set[asyncio.Task[Any]] = set()
        """The calls of `compute_score`."""
        # After the imports and the tokenizers of the manager, which are frozen with all else.
        freeze_and_raise_gc_threshold()

    @ray.method(max_task_retries=0)  # the callers repeat it: Ray would give up before it has detected a lost node
    async def compute_score(
        self, data: Any, lost: Collection[str] | None = None, release: Callable[[], None] | None = None
    ) -> Reward:
        """Score one rollout.

        Args:
            data: a ``DataProto`` with one row per output of the rollout, or a `RewardSample`.
            lost: for a manager that needs groups: the rollouts of the prompt that are known not to come; ``None`` if
                the caller does not report them.
            release: called in this process when the sample waits for its group.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        # Without a context manager, which would cost a twentieth of the time per sample.
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if lost is not None:
                CALLER.set(Caller(reports_lost=True, repeats=True, lost=lost, release=release))
            reward = await self._manager.run_single(data)
            if reward["reward_extra_info"].get("reward_outcome") == Outcome.FAILED:
                await self._limits.arrived()  # before the trainer has the reward, and asks whether too many failed
        except RewardLoopError as error:
            # verl's agent loop catches what this raises, and only drops the rollout: the trainer asks the job.
            self._limits.stop(f"{type(error).__name__}: {error}")
            await self._limits.arrived()
            raise
        finally:
            self._running.discard(task)
        # In this order: a function seldom returns this key.
        return _renamed(reward) if "reward" in reward["reward_extra_info"] and _is_validation(data) else reward

    @ray.method(max_task_retries=0)
    async def compute_score_in_group(self, data: Any, lost: Collection[str]) -> AsyncIterator[Reward | None]:
        """Score one rollout. Yield ``None`` when it waits for its group, and then the reward."""
        waits = asyncio.Event()
        if self._manager.groups is None:  # a manager of the user, which does not tell
            waits.set()
        scoring = asyncio.create_task(self.compute_score(data, lost, waits.set))
        waiting = asyncio.create_task(waits.wait())
        try:
            await asyncio.wait([scoring, waiting], return_when=asyncio.FIRST_COMPLETED)
            yield None
            yield await scoring
        finally:
            scoring.cancel()  # no effect after its end
            waiting.cancel()

    async def stop(self) -> None:
        """Cancel all calls of `compute_score`, and close the manager and the limits. Their callers have ended."""
        for task in list(self._running):
            task.cancel()
        await asyncio.to_thread(self._manager.close)
        self._limits.close()

    async def lose(self, prompt: str, size: int, rollouts: list[str]) -> None:
        """Do not wait for these rollouts of a prompt: they will not be scored."""
        if self._manager.groups is not None:
            self._manager.groups.lose(prompt, size, rollouts)

    async def needs_group(self) -> bool:
        """Return whether one worker must receive all samples of a prompt. Also used as a health check."""
        return self._manager.needs_group


def _is_validation(data: Any) -> bool:
    if isinstance(data, RewardSample):
        return bool(data.validate)
    row = data.non_tensor_batch
    return VALIDATE in row and bool(row[VALIDATE][-1])


def _renamed(reward: Reward) -> Reward:
    """Return the reward of a validation sample with the key `reward` of its extra info renamed.

    verl collects the scores of a validation in a column of that name, to which it would append the function's values.
    """
    info = reward["reward_extra_info"]
    renamed = {"returned_reward" if name == "reward" else name: value for name, value in info.items()}
    return Reward(reward_score=reward["reward_score"], reward_extra_info=renamed)
