"""The agent as a Ray actor, with the names that the async reward agent for verl made known."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import Group, PendingRewards
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers.registry import get as get_manager
from reward_loop.scoring import ScoringFunction
from reward_loop.scoring.load import load_function
from reward_loop.types import Reward

__all__ = ["AsyncRewardAgent", "RayAsyncRewardAgent"]

MAX_CALLS = 100_000
"""Calls that the actor answers at a time; they only wait, so that this is no bound on judging."""


class AsyncRewardAgent:
    """What `RayAsyncRewardAgent` runs; in a process with an event loop it can be used without Ray."""

    def __init__(
        self,
        compute_score: Any,
        *,
        config: RewardLoopConfig | Mapping[str, Any] | None = None,
        manager: str = "naive",
        reward_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        concurrency: int | None = None,
    ) -> None:
        """Load the function and make the manager.

        Args:
            compute_score: a reward function in any form, or its path: ``reward.py:compute_score``.
            config: `RewardLoopConfig`, or a mapping of its options.
            manager: the reward manager, by name or import path.
            reward_kwargs: configured arguments of the function, or of its class.
            tokenizer: decodes responses; needed for a ``DataProto``.
            reward_router_address: passed to the function.
            reward_model_tokenizer: passed to the function.
            concurrency: how many samples are in work at a time; ``None`` for all.
        """
        options = parse(RewardLoopConfig, config, "config")
        function = ScoringFunction(
            load_function(compute_score) if isinstance(compute_score, str) else compute_score,
            reward_kwargs=reward_kwargs,
            options=options,
        )
        self._agent = RewardAgent(
            get_manager(manager)(
                config=options,
                tokenizer=tokenizer,
                compute_score=function,
                reward_router_address=reward_router_address,
                reward_model_tokenizer=reward_model_tokenizer,
            ),
            concurrency=concurrency,
        )
        self._entered = False
        self._taking = asyncio.Lock()
        self._batches: deque[_Batch] = deque()

    async def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Take a batch, and return how many samples it has, at once.

        Ray may run two calls of an asynchronous actor in either order: get the answer of one before the next.

        Args:
            data: a list of `RewardSample`, or verl's ``DataProto``. Samples with the same ``uid`` make a group,
                wherever they are; where there are no uids, or each is another, groups are neighbours.
            group_size: how many samples each group has.

        Raises:
            ConfigError: the batch does not divide into such groups.
        """
        if not self._entered:
            self._entered = True
            await self._agent.__aenter__()
        rows = [data[i : i + 1] for i in range(len(data))] if hasattr(data, "batch") else list(data)
        order = _by_group(_uids(data), len(rows), group_size)
        pending = self._agent.submit([rows[i] for i in order], group_size=group_size)
        if rows:
            self._batches.append(_Batch(pending, order, group_size, _Shape(data) if hasattr(data, "batch") else None))
        return len(rows)

    async def get(self, chunk_size: int, hook_func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the rewards of ``chunk_size`` samples, in whole groups, of the oldest batch that has any left.

        Groups come in order of completion, and inside the answer in order of index. The last chunk of a batch may be
        smaller.

        Args:
            chunk_size: a multiple of the batch's group size.
            hook_func: called with the answer and ``kwargs``; what it returns is returned instead.

        Returns:
            The samples' places in their batch; their rewards; and for each key of the extra infos a column, with
            ``None`` for a sample that lacks it. For a ``DataProto`` the rewards are a float32 tensor with a row a
            sample and the reward at the last response token, and the columns numpy arrays; otherwise both are lists.

        Raises:
            RewardLoopError: nothing was submitted, or an error that must stop the run ended the batch.
            ConfigError: the chunk does not divide into groups.
        """
        async with self._taking:
            if not self._batches:
                raise RewardLoopError("nothing to get: every submitted batch has been taken")
            batch = self._batches[0]
            if chunk_size < 1 or chunk_size % batch.group_size:
                raise ConfigError(f"chunk_size {chunk_size} is no multiple of the group size, {batch.group_size}")
            try:
                groups = await batch.take(chunk_size // batch.group_size)
            except RewardLoopError:
                self._batches.popleft()
                raise
            if batch.left == 0:
                self._batches.popleft()
        answer = batch.answer(groups)
        if hook_func is None:
            return answer
        return await asyncio.to_thread(hook_func, *answer, **kwargs)

    async def shutdown(self) -> None:
        """Cancel what has not ended."""
        for batch in self._batches:
            batch.pending.cancel()
        if self._entered:
            await self._agent.__aexit__(None, None, None)


RayAsyncRewardAgent = ray.remote(max_concurrency=MAX_CALLS)(AsyncRewardAgent)
"""The actor: ``RayAsyncRewardAgent.remote("reward.py:compute_score")``, or with Ray's own ``options`` before that."""


class _Batch:
    """A batch, and how much of it has been handed out."""

    def __init__(self, pending: PendingRewards, order: list[int], group_size: int, shape: _Shape | None) -> None:
        self.pending = pending
        self.group_size = group_size
        self.left = pending.group_count
        self._order = order
        self._shape = shape

    async def take(self, groups: int) -> list[Group]:
        """Wait for so many groups, or for those that are left. A call that is cancelled takes none."""
        first = self.pending.group_count - self.left
        await self.pending.wait(first + groups)
        taken = self.pending.complete_groups(first)[:groups]
        self.left -= len(taken)
        if not self.left:
            await self.pending
        return taken

    def answer(self, groups: list[Group]) -> tuple[list[int], Any, dict[str, Any]]:
        pairs = [
            (self._order[i], reward) for group in groups for i, reward in zip(group.indices, group.rewards, strict=True)
        ]
        pairs.sort(key=lambda pair: pair[0])
        indices = [i for i, _ in pairs]
        rewards = [reward for _, reward in pairs]
        scores: Any = [reward["reward_score"] for reward in rewards]
        infos = _columns(rewards)
        if self._shape is not None:
            return indices, self._shape.tensor(indices, scores), {key: _array(column) for key, column in infos.items()}
        return indices, scores, infos


class _Shape:
    """Where the rewards of a ``DataProto``'s rows go."""

    def __init__(self, data: Any) -> None:
        responses = data.batch["responses"]
        self.width = responses.shape[-1]
        self.lengths: list[int] = data.batch["attention_mask"][:, -self.width :].sum(dim=-1).tolist()

    def tensor(self, indices: list[int], scores: list[float]) -> Any:
        import torch

        rewards = torch.zeros(len(indices), self.width, dtype=torch.float32)
        for row, (i, score) in enumerate(zip(indices, scores, strict=True)):
            rewards[row, max(0, self.lengths[i] - 1)] = score
        return rewards


def _columns(rewards: Sequence[Reward]) -> dict[str, list[Any]]:
    """Turn extra infos into columns; a key may be missing from any of them."""
    infos = [reward.get("reward_extra_info") or {} for reward in rewards]
    return {key: [info.get(key) for info in infos] for key in dict.fromkeys(key for info in infos for key in info)}


def _array(column: list[Any]) -> Any:
    import numpy as np

    array = np.empty(len(column), dtype=object)
    array[:] = column
    return array


def _uids(data: Any) -> list[Any] | None:
    if hasattr(data, "batch"):
        uids = data.non_tensor_batch.get("uid")
        return None if uids is None else list(uids)
    uids = [getattr(sample, "uid", None) for sample in data]
    return None if None in uids else uids


def _by_group(uids: list[Any] | None, count: int, group_size: int) -> list[int]:
    """Return the samples' places, the members of each group beside each other."""
    places: dict[Any, list[int]] = {}
    for i, uid in enumerate(uids or ()):
        places.setdefault(uid, []).append(i)
    if len(places) in (0, count):
        return list(range(count))
    wrong = [uid for uid, members in places.items() if len(members) != group_size]
    if wrong:
        raise ConfigError(
            f"samples with the same uid make a group of {group_size}, and {len(places[wrong[0]])} have uid {wrong[0]!r}"
        )
    return [i for members in places.values() for i in members]
