"""The group of reward workers, on all nodes: as the trainer uses it, and as verl's agent loop does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import RewardFunctionError, RewardLoopError
from reward_loop.managers.base import decide
from reward_loop.managers.groups import CALLER
from reward_loop.types import Outcome, Reward, RewardResult, RewardSample
from reward_loop.verl.options import RewardSettings
from reward_loop.verl.run.job import RunningJob
from reward_loop.verl.run.services import worker_nodes
from reward_loop.verl.samples import row_name
from reward_loop.verl.workers.reward_worker import RewardWorker

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TASK_RETRIES = 3
"""How many times a sample is scored again after its worker died. After that, the sample has failed."""

BUSY_S = 5.0
"""The longest wait for busy workers to stop, in seconds."""

CHECK_S = 60.0
"""The longest wait for the rewards of a batch between two checks for fatal errors, in seconds."""


def prompt_of(data: Any) -> str:
    """Return the uid of the prompt of one rollout, a ``DataProto`` or a `RewardSample`."""
    if isinstance(data, RewardSample):
        return str(data.group or data.uid)
    return str(data.non_tensor_batch["uid"][-1])


def _rollout_of(data: Any) -> str | None:
    """Return the uid of one rollout: the name by which its group knows it."""
    if isinstance(data, RewardSample):
        return data.uid
    return row_name({name: column[-1] for name, column in data.non_tensor_batch.items()})


def name_of(number: int) -> str:
    """Return the name of a reward worker in the job."""
    return f"reward worker {number}"


async def _score(worker: Any, data: Any, lost: frozenset[str | None] | None) -> Reward:
    """Call a worker. If the sample waits there for its group, the caller is told so, see `Caller.release`."""
    if (release := CALLER.get().release) is None or lost is None:
        reward: Reward = await worker.compute_score.remote(data, *(() if lost is None else (lost,)))
        return reward
    found: Reward | None = None
    try:
        async for answer in worker.compute_score_in_group.remote(data, lost):
            if (found := await answer) is None:
                release()
    except RayActorError:
        if found is None:  # otherwise the worker died after its last answer
            raise
    assert found is not None
    return found


@dataclass(slots=True)
class _GroupedPrompt:
    """A prompt whose rollouts are scored together."""

    size: int
    """The number of its rollouts."""
    lost: set[str | None] = field(default_factory=set)
    """The uids of the rollouts that the others do not wait for: they will not be scored, or have left without one."""
    is_scored: bool = False
    """Whether a score of its group has arrived: then the group was closed."""


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
        """Score one rollout, a ``DataProto`` or a `RewardSample`; again if its worker dies.

        Raises:
            RewardFunctionError: the worker died too often, or stayed unreachable, and the policy is ``raise``.
            RewardLoopError: the worker did not start again, so its share of all further samples would fail.
        """
        try:
            try:
                return await self._repeated(data)
            except RayActorError as error:
                if error.actor_init_failed:
                    # For example, the user's class may raise because the dead worker has left a file or a port.
                    raise RewardLoopError(f"a reward worker died, and did not start again: {error}") from error
                return await self._failed(error)
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

    async def _repeated(self, data: Any) -> Reward:
        """Send a sample to a worker, and wait for its reward; again if the worker dies, up to `MAX_TASK_RETRIES` times.

        Raises:
            RayActorError: the worker died too often, or stayed unreachable.
        """
        number, prompt = self._number_for(data), self._prompts.get(prompt_of(data)) if self.by_group else None
        try:
            for attempt in itertools.count(1):
                lost = None if prompt is None else frozenset(prompt.lost)
                try:
                    reward = await _score(self._workers[number], data, lost)
                except RayActorError:
                    if attempt > MAX_TASK_RETRIES:
                        raise
                    await self._until_reachable(number)
                    # Its group was closed with it, and the others have their rewards, perhaps only since its worker
                    # died: it cannot be compared any more.
                    if prompt is not None and prompt.is_scored:
                        raise
                else:
                    break
        except RayTaskError:
            if prompt is not None:  # its worker knows that it has left; the name is for the worker after a restart
                prompt.lost.add(_rollout_of(data))
            raise
        except BaseException:
            if prompt is not None:  # no worker knows
                self.lose(prompt_of(data), _rollout_of(data))
            raise
        if prompt is not None:
            if reward["reward_extra_info"].get("reward_outcome") in (Outcome.UNSCORED, Outcome.FAILED):
                prompt.lost.add(_rollout_of(data))
            else:
                prompt.is_scored = True
        return reward

    @contextlib.contextmanager
    def prompt(self, uid: str, size: int) -> Iterator[None]:
        """Announce that this process submits all rollouts of a prompt within the block, or reports them as lost."""
        self._prompts[uid] = _GroupedPrompt(size)
        try:
            yield
        finally:
            del self._prompts[uid]

    def lose(self, uid: str, rollout: str | None) -> None:
        """Report that a rollout of a prompt will not be scored: the others do not wait for it, if they still do."""
        prompt = self._prompts[uid]
        if rollout not in prompt.lost and not prompt.is_scored:
            prompt.lost.add(rollout)
            # Not awaited: if the worker dies, the samples that are submitted again bring the names along.
            self._workers[self._number_of(uid)].lose.remote(uid, prompt.size, [rollout])

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
            f"the reward worker died {MAX_TASK_RETRIES + 1} times while it scored this sample, or once when others of "
            "its prompt already had their scores, with which this one must be compared, or did not restart within "
            f"{self.options.worker_answer_timeout_s:g} s (reward_loop.worker_answer_timeout_s): does the reward "
            f"function crash the interpreter, or run out of memory? ({type(error).__name__})",
            cause="a reward worker died",
        )
        logger.error("%s", failure)
        await self.count_failure(str(failure), failure.cause)  # no worker has counted it
        result = RewardResult(Outcome.FAILED, None, error=str(failure), exception=failure)
        return decide(result, self.options).to_reward()


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
        with contextlib.ExitStack() as prompts:
            if self.client.by_group:
                sizes = Counter(map(prompt_of, rows))
                for uid, size in sizes.items():
                    prompts.enter_context(self.client.prompt(uid, size))
                for row in rows:
                    row.non_tensor_batch["group_size"] = np.array([sizes[prompt_of(row)]] * len(row), dtype=object)
            return self._results([self.client.remote(row) for row in rows])

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
