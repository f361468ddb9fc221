"""The agent as a Ray actor, with the method names of the async reward agent that was proposed for verl (verl#2854).

The actor keeps nothing outside its process. The caller keeps what it submitted: if the actor dies, the caller starts
another one, and submits again what it has not received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from reward_loop._util.process import raise_gc_threshold
from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import MiniBatch, PendingRewards
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.scorer import load_scorer

__all__ = ["AsyncRewardAgent", "RayAsyncRewardAgent"]


class AsyncRewardAgent:
    """The implementation of `RayAsyncRewardAgent`. It also works without Ray, in a process with an event loop."""

    def __init__(
        self, compute_score: Any, config: Any = None, manager: str = "naive", concurrency: Any = None, **rest: Any
    ) -> None:
        """Load the function and create the manager.

        Args:
            compute_score: a reward function, or its path: ``reward.py:compute_score``.
            config: `RewardLoopConfig`, or a mapping of its options.
            manager: the reward manager, by name or import path.
            concurrency: how many samples run at a time; ``None`` for no limit.
            rest: ``reward_kwargs``, configured arguments of the function or its class; ``tokenizer``, which decodes the
                responses of a ``DataProto``; ``router_address`` and ``reward_model_tokenizer``, passed to the function.

        Raises:
            ConfigError: an option is invalid.
            FunctionLoadError: the function cannot be loaded.
        """
        scorer = load_scorer(compute_score, manager, parse(RewardLoopConfig, config, "config"), **rest)
        raise_gc_threshold()
        self._agent = RewardAgent(scorer.manager, concurrency=concurrency)
        self._taking = asyncio.Lock()
        self._batches: deque[_Submitted] = deque()
        """The batches with groups that were not handed out, the oldest first."""

    async def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Submit a batch; return its number of samples at once.

        Ray may run two calls of an async actor in either order: wait for one answer before the next call.

        Args:
            data: a list of `RewardSample`, or verl's ``DataProto``. The members of a group are neighbours.
            group_size: the size of each group.

        Raises:
            ConfigError: the batch does not divide into these groups, or uids occur twice and a group is not all samples
                of one uid.
        """
        if self._agent.loop is None:
            await self._agent.__aenter__()
        _check_groups(data, group_size)
        rows = [data[i : i + 1] if hasattr(data, "batch") else data[i] for i in range(len(data))]
        if rows:
            self._batches.append(_Submitted(self._agent.submit(rows, group_size=group_size), data, group_size))
        return len(rows)

    async def get(self, chunk_size: int, hook_func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the rewards of ``chunk_size`` samples, in whole groups, of the oldest batch that has any left.

        Groups come in order of completion, and inside the answer in order of index. The last chunk of a batch may be
        smaller. A call that fails, or is cancelled while it waits, takes nothing.

        Args:
            chunk_size: a multiple of the batch's group size.
            hook_func: called with the answer and ``kwargs``; its result is returned instead.

        Returns:
            The indices of the samples in their batch; their rewards; and one column per key of the extra infos, with
            ``None`` for a sample without that key. For a ``DataProto`` the rewards are a float32 tensor of shape
            (samples, response length) with the reward at the last response token, and the columns are numpy arrays;
            otherwise both are lists.

        Raises:
            RewardLoopError: every submitted batch was taken, or an error that must stop the run ended the batch.
            ConfigError: ``chunk_size`` is not a multiple of the group size.
        """
        # One at a time: two calls that wait would return the same groups.
        async with self._taking:
            if not self._batches:
                raise RewardLoopError("nothing to get: every submitted batch has been taken")
            batch = self._batches[0]
            if chunk_size < 1 or chunk_size % batch.group_size:
                raise ConfigError(f"chunk_size {chunk_size} is not a multiple of the group size {batch.group_size}")
            last = batch.taken + chunk_size // batch.group_size
            try:
                await batch.pending.wait(last)
            except RewardLoopError:
                self._batches.popleft()
                raise
            answer = batch.answer(last)
            batch.taken = last
            if last >= batch.pending.group_count:
                self._batches.popleft()
        # In a thread, and without the lock: the hook is user code, which may take long.
        return answer if hook_func is None else await asyncio.to_thread(hook_func, *answer, **kwargs)

    async def shutdown(self) -> None:
        """Cancel what has not ended, and close the agent."""
        if self._agent.loop is not None:
            await self._agent.__aexit__(None, RewardsCancelledError("the agent was shut down"), None)


# Calls only wait, so their number does not limit scoring.
RayAsyncRewardAgent = ray.remote(max_concurrency=100_000)(AsyncRewardAgent)
"""The actor: ``RayAsyncRewardAgent.remote("reward.py:compute_score")``, or with Ray's ``options(...)`` first."""


@dataclass
class _Submitted:
    """A submitted batch, and how much of it was handed out."""

    pending: PendingRewards
    data: Any
    """The batch as it was submitted."""
    group_size: int
    taken: int = 0
    """The number of groups that were handed out."""

    def answer(self, last: int) -> tuple[list[int], Any, dict[str, Any]]:
        """Return the answer of `AsyncRewardAgent.get`, for the groups that are complete and not handed out."""
        groups = MiniBatch(tuple(self.pending.complete_groups(self.taken, last)))
        rewards = dict(zip(groups.indices, groups.rewards, strict=True))
        indices = sorted(rewards)
        scores = [rewards[i]["reward_score"] for i in indices]
        infos = [rewards[i]["reward_extra_info"] for i in indices]
        columns: dict[str, Any] = dict.fromkeys(key for info in infos for key in info)
        columns = {key: [info.get(key) for info in infos] for key in columns}
        if not hasattr(self.data, "batch"):
            return indices, scores, columns
        columns = {name: np.fromiter(column, dtype=object, count=len(column)) for name, column in columns.items()}
        return indices, RewardLoopManagerBase.assemble_rm_scores(self.data[indices], scores), columns


def _check_groups(data: Any, size: int) -> None:
    """Raise an error unless each group has all samples of one uid, as verl gives those of a prompt the same one."""
    uids = list(data.non_tensor_batch.get("uid", ()) if hasattr(data, "batch") else (sample.uid for sample in data))
    names = set(uids)
    if None in names or len(names) == len(uids):  # then they do not name prompts
        return
    groups = [set(uids[first : first + size]) for first in range(0, len(uids), max(1, size))]
    if len(groups) != len(names) or any(len(group) > 1 for group in groups):
        raise ConfigError(
            f"the groups of {size} samples are not all samples of one uid each: put the samples of a prompt next to "
            "each other, or give another group_size"
        )
