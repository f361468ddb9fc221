"""The client of the reward workers, which verl's agent loop uses like the handle of one reward worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardFunctionError, RewardLoopError
from reward_loop.managers.base import decide
from reward_loop.managers.groups import CALLER
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample

logger = logging.getLogger(__name__)

MAX_TASK_RETRIES = 3
"""How many times a sample is scored again after its worker died. After that, the sample has failed."""


def raise_if_lost(error: RayActorError) -> None:
    """Raise `RewardLoopError` if a reward worker could not be restarted. Ray restarts only workers that had started.

    For example, the constructor of the user's class may fail because the dead worker has left a file or a port.
    """
    if error.actor_init_failed:
        raise RewardLoopError(f"a reward worker died, and did not start again: {error}") from error


def prompt_of(data: Any) -> str:
    """Return the uid of the prompt of one rollout, a ``DataProto`` or a `RewardSample`."""
    if isinstance(data, RewardSample):
        return str(data.group or data.uid)
    return str(data.non_tensor_batch["uid"][-1])


def name_of(number: int) -> str:
    """Return the name of a reward worker in the job."""
    return f"reward worker {number}"


async def _score(worker: Any, data: Any, lost: frozenset[str] | None) -> Reward:
    """Call a worker. If the sample waits there for its group, the caller is told so, see `Caller.release`."""
    if (release := CALLER.get().release) is None or lost is None:
        reward: Reward = await worker.compute_score.remote(data, *(() if lost is None else (lost,)))
        return reward
    async for answer in worker.compute_score_in_group.remote(data, lost):
        if (found := await answer) is None:
            release()
        else:
            reward = found
    return reward


@dataclass(slots=True)
class _GroupedPrompt:
    """A prompt whose rollouts are scored together."""

    size: int
    """The number of its rollouts."""
    lost: set[str] = field(default_factory=set)
    """The uids of the rollouts that will not be scored."""
    is_scored: bool = False
    """Whether a reward of its group has arrived: then the group was closed."""


class RewardClient:
    """Distributes samples among the reward workers.

    verl's agent loop uses it like the handle of one reward worker: ``await client.compute_score.remote(data)``. Samples
    go to the workers in turn; with ``by_group``, all samples of a prompt go to the same worker. A sample whose worker
    dies repeatedly has failed.
    """

    def __init__(self, workers: Sequence[Any], options: RewardLoopConfig, job: Any) -> None:
        self._workers = list(workers)
        self._job = job
        """The handle of the job's actor."""
        self.options = options
        self._turn = 0
        self.by_group = False
        self._prompts: dict[str, _GroupedPrompt] = {}
        """With `by_group`: the prompts whose rollouts this process submits or reports as lost."""

    @property
    def compute_score(self) -> RewardClient:
        """The client itself: verl calls ``compute_score.remote``."""
        return self

    async def remote(self, data: Any) -> Reward:
        """Score ``data``, one rollout as a ``DataProto``, or a `RewardSample`."""
        try:
            return await self.reward_of(data)
        except RewardLoopError as error:
            # The first reason stays. The worker has reported its own error before, unless it cannot reach the job.
            cause = error.cause if isinstance(error, RayTaskError) else error
            await self.stop_run(f"{type(cause).__name__}: {cause}")
            raise

    def _number_for(self, data: Any) -> int:
        """Return the next worker in turn; with ``by_group``, the worker of the prompt: the same in every process."""
        if self.by_group:
            return self._number_of(prompt_of(data))
        # In turn, where verl chooses at random, so that workers have equal loads.
        self._turn += 1
        return (self._turn - 1) % len(self._workers)

    def _number_of(self, prompt: str) -> int:
        # Not `hash`, which is another one in each process.
        return zlib.crc32(prompt.encode()) % len(self._workers)

    async def reward_of(self, data: Any) -> Reward:
        """Send a sample to a worker, and wait for its reward; again if the worker dies, up to `MAX_TASK_RETRIES` times.

        Raises:
            RewardFunctionError: the worker died too often, or stayed unreachable, and the policy is ``raise``.
            RewardLoopError: the worker did not start again, so its share of all further samples would fail.
        """
        number, prompt = self._number_for(data), self._prompts.get(prompt_of(data)) if self.by_group else None
        worker = self._workers[number]
        try:
            for attempt in itertools.count(1):
                try:
                    reward = await _score(worker, data, None if prompt is None else frozenset(prompt.lost))
                except RayActorError:
                    # Its group was closed with it, and the others have their rewards: it cannot be compared any more.
                    if attempt > MAX_TASK_RETRIES or (prompt is not None and prompt.is_scored):
                        raise
                    await self._until_reachable(number)
                else:
                    if prompt is not None:
                        prompt.is_scored = True
                    return reward
        except RayActorError as error:
            raise_if_lost(error)
            return await self._failed(error)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def prompt(self, uid: str, size: int) -> Iterator[None]:
        """Announce that this process submits all rollouts of a prompt within the block, or reports them as lost."""
        self._prompts[uid] = _GroupedPrompt(size)
        try:
            yield
        finally:
            del self._prompts[uid]

    def lose(self, prompt: str, rollout: str) -> None:
        """Report that a rollout of a prompt will not be scored, so that the others do not wait for it."""
        if (found := self._prompts.get(prompt)) is not None:
            found.lost.add(rollout)
            # Not awaited: if the worker dies, the samples that are submitted again bring the names along.
            self._workers[self._number_of(prompt)].lose.remote(prompt, found.size, [rollout])

    async def stop_run(self, why: str) -> None:
        """Record why the run must stop, before the trainer asks."""
        # If the actor is not there, the trainer ends the run.
        with contextlib.suppress(RayError):
            await self._job.stop.remote(why)

    async def count_failure(self, error: str, cause: str | None) -> None:
        """Count a sample that failed without a worker, for the failure bound."""
        with contextlib.suppress(RayError):
            await self._job.count_failure.remote(error, cause)

    async def _until_reachable(self, number: int) -> None:
        """Wait until Ray has restarted a worker. Otherwise, others get the permits that it holds.

        A worker whose node is lost is unreachable until Ray has detected the loss. Until then, Ray repeats each call
        for a second or more before the call fails, so this loop does not need a pause.

        Raises:
            RayActorError: the worker stayed unreachable, or cannot be restarted.
        """
        began = time.monotonic()
        deadline = began + self.options.worker_answer_timeout_s
        while True:
            try:
                ready = self._workers[number].__ray_ready__.remote()
                await asyncio.wait_for(ready, max(0.0, deadline - time.monotonic()))
                return
            except (RayActorError, TimeoutError) as error:
                if isinstance(error, ActorUnavailableError) and time.monotonic() <= deadline:
                    continue
                with contextlib.suppress(RayError):
                    await self._job.lose.remote(name_of(number), time.monotonic() - began)
                if isinstance(error, TimeoutError):  # for example, no node has the resources for a restart
                    raise ActorUnavailableError("it has not restarted in time", None) from None
                raise

    async def _failed(self, error: RayActorError) -> Reward:
        failure = RewardFunctionError(
            f"the reward worker died {MAX_TASK_RETRIES + 1} times while it scored this sample, or did not restart "
            f"within {self.options.worker_answer_timeout_s:g} s (reward_loop.worker_answer_timeout_s): does the reward "
            f"function crash the interpreter, or run out of memory? ({type(error).__name__})",
            cause="a reward worker died",
        )
        logger.error("%s", failure)
        await self.count_failure(str(failure), failure.cause)  # no worker has counted it
        result = RewardResult(outcome=Outcome.FAILED, score=None, error=str(failure), exception=failure)
        return decide(result, self.options).to_reward()
