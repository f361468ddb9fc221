"""The reward worker: a Ray actor that scores verl's rollouts with one reward manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from reward_loop._util.process import freeze_and_raise_gc_threshold, raise_descriptor_limit
from reward_loop.errors import InvalidScoreError, RewardLoopError
from reward_loop.limits import FailureBound, open_limits
from reward_loop.managers.base import VALIDATE, open_records
from reward_loop.managers.post_process import PostProcess, fail_reward
from reward_loop.types import PART_KEYS, RESERVED_KEYS, Reward, RewardSample
from reward_loop.verl.managers import build_manager
from reward_loop.verl.options import RewardSettings


class RewardWorker:
    """Scores samples with one reward manager. A Ray actor with asynchronous methods.

    Args:
        settings: the settings of rewards.
        router: the ``host:port`` of the router in front of the reward models; ``None`` without a reward model.
        workers_on_node: the number of reward workers on this worker's node, which share its cores; by default all
            workers of the run.
    """

    def __init__(
        self,
        settings: RewardSettings,
        router: str | None,
        workers_on_node: int | None = None,
    ) -> None:
        raise_descriptor_limit()  # a request in flight is an open connection, and so an open file
        self._options = settings.options
        self._limits = open_limits(self._options)
        self._manager = build_manager(settings, router, self._limits, workers_on_node or settings.num_workers)
        self._post_process = PostProcess.of(self._manager)
        self._rejections = FailureBound.of_options(self._options, of=", ".join(sorted(PART_KEYS)))
        self._fatal: str | None = None
        self._running: set[asyncio.Task[Any]] = set()
        """The calls of `compute_score`."""
        self._is_stopped = False
        # After the imports and the tokenizers of the manager, which are frozen with all else.
        freeze_and_raise_gc_threshold()

    @ray.method(max_task_retries=0)  # the callers repeat it: Ray would give up before it has detected a lost node
    async def compute_score(self, data: Any) -> Reward:
        """Score one rollout.

        Args:
            data: a ``DataProto`` with one row per output of the rollout, or a `RewardSample`.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        # Without a context manager, which would cost a twentieth of the time per sample.
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if self._is_stopped:
                await asyncio.Event().wait()  # until the worker ends
            reward = await self._manager.run_single(data)
        except asyncio.CancelledError:
            if self._is_stopped:
                await asyncio.Event().wait()
            raise
        except RewardLoopError as error:
            self._store_fatal(error)
            raise
        finally:
            self._running.discard(task)
        return _without_clash(reward) if _is_validation(data) else reward

    async def stop(self) -> None:
        """Cancel all calls of `compute_score`, and close the manager and the limits, because training has ended.

        Cancelled calls and later ones get no answer, so that rollouts in flight cause no errors. They fail when the
        worker ends, with the run.
        """
        self._is_stopped = True
        for task in list(self._running):
            task.cancel()
        await asyncio.to_thread(self._manager.close)
        self._limits.close()

    @contextlib.contextmanager
    def _storing_fatal_errors(self) -> Iterator[None]:
        try:
            yield
        except RewardLoopError as error:
            self._store_fatal(error)
            raise

    def _store_fatal(self, error: RewardLoopError) -> None:
        # The trainer asks for it: verl's agent loop catches what `compute_score` raises, and only drops the rollout.
        self._fatal = self._fatal or f"{type(error).__name__}: {error}"

    async def stop_run(self, message: str) -> None:
        """Store a fatal error of another process: the next `fatal_error` returns it."""
        self._fatal = self._fatal or message

    async def fatal_error(self) -> str | None:
        """Return why the run must stop, or ``None``. Also used as a health check."""
        if self._fatal is None and self._options.job:
            self._fatal = await self._limits.why_stopped()
        return self._fatal

    async def exchange_counts(self) -> dict[str, Any] | None:
        """Return the counts of exchanges with model servers since the last call; ``None`` without records."""
        writer = open_records(self._options)
        return None if writer is None else writer.exchange_counts.take()

    async def has_post_process(self) -> bool:
        """Return whether the user's class has ``post_process_scores``."""
        return self._post_process is not None

    async def post_process(self, rewards: list[Reward], names: list[str]) -> list[Reward]:
        """Apply the user's ``post_process_scores`` to the rewards of one group.

        Args:
            rewards: the rewards of the group's samples.
            names: the name of each sample, for messages.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        assert self._post_process is not None
        with self._storing_fatal_errors():
            return await self._post_process(rewards, names)

    async def reject(self, rewards: list[Reward], names: list[str], problems: list[str], accepted: int) -> list[Reward]:
        """Turn samples whose ``turn_level_scores`` or ``token_level_scores`` do not fit into failed samples.

        Args:
            rewards: the rewards of these samples.
            names: the name of each sample.
            problems: the problem of each sample.
            accepted: the number of samples whose scores fit; they count in the bound on the share of failures.

        Raises:
            RewardLoopError: the run must stop: by the user's policy, or because too many samples failed.
        """
        for _ in range(accepted):
            self._rejections.add(False, None, None)
        failed = []
        with self._storing_fatal_errors():
            for reward, name, problem in zip(rewards, names, problems, strict=True):
                # Drop the values that the function returned, as for every failed sample.
                info = {key: value for key, value in reward["reward_extra_info"].items() if key in RESERVED_KEYS}
                kept = Reward(reward_score=0.0, reward_extra_info=info)
                error = InvalidScoreError(problem, sample=RewardSample("", uid=name))
                failed.append(fail_reward(kept, error, self._rejections, self._options))
        return failed

    async def needs_group(self) -> bool:
        """Return whether one worker must receive all samples of a prompt. Also used as a health check."""
        return self._manager.needs_group


def _is_validation(data: Any) -> bool:
    if isinstance(data, RewardSample):
        return bool(data.validate)
    row = data.non_tensor_batch
    return VALIDATE in row and bool(row[VALIDATE][-1])


def _without_clash(reward: Reward) -> Reward:
    """Return the reward of a validation sample with the key `reward` of its extra info renamed.

    verl collects the scores of a validation in a column of that name, to which it would append the function's values.
    """
    info = reward["reward_extra_info"]
    if "reward" not in info:
        return reward
    renamed = {"returned_reward" if name == "reward" else name: value for name, value in info.items()}
    return Reward(reward_score=reward["reward_score"], reward_extra_info=renamed)
