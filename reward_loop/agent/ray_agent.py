"""The agent as a Ray actor, with the method names of the async reward agent that was proposed for verl (verl#2854).

The actor keeps nothing outside its process. The caller keeps what it submitted: if the actor dies, the caller starts
another one, and submits again what it has not received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from reward_loop._util.process import freeze_and_raise_gc_threshold
from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.pending import Group, PendingRewards
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.scorer import load_scorer
from reward_loop.types import Reward

__all__ = ["AsyncRewardAgent", "RayAsyncRewardAgent"]

MAX_CALLS = 100_000
"""Concurrent calls of the actor. Calls only wait, so this does not limit scoring."""


class AsyncRewardAgent:
    """The implementation of `RayAsyncRewardAgent`. It also works without Ray, in a process with an event loop."""

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
        """Load the function and create the manager.

        Args:
            compute_score: a reward function in any form, or its path: ``reward.py:compute_score``.
            config: `RewardLoopConfig`, or a mapping of its options.
            manager: the reward manager, by name or import path.
            reward_kwargs: configured arguments of the function or its class.
            tokenizer: decodes responses; needed for a ``DataProto``.
            reward_router_address: passed to the function.
            reward_model_tokenizer: passed to the function.
            concurrency: how many samples run at a time; ``None`` for no limit.

        Raises:
            ConfigError: an option is invalid, or asks for an audit.
            FunctionLoadError: the function cannot be loaded.
        """
        options = parse(RewardLoopConfig, config, "config")
        if options.audit.is_on:
            raise ConfigError(
                "reward_loop.audit is on, and AsyncRewardAgent makes no probes: leave the option out, or use a "
                "RewardAgent after reward_loop.audit.open_audit(manager)"
            )
        scorer = load_scorer(
            compute_score,
            manager,
            options,
            reward_kwargs=reward_kwargs,
            tokenizer=tokenizer,
            router_address=reward_router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
        self._agent = RewardAgent(scorer.manager, concurrency=concurrency)
        self._taking = asyncio.Lock()
        self._batches: deque[_Submitted] = deque()
        """The batches with groups that were not handed out, the oldest first."""

    async def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Submit a batch; return its number of samples at once.

        Ray may run two calls of an async actor in either order: wait for one answer before the next call.

        Args:
            data: a list of `RewardSample`, or verl's ``DataProto``. Samples with the same ``uid`` are a group, wherever
                they are. Without uids, or if all uids differ, the members of a group are neighbours.
            group_size: the size of each group.

        Raises:
            ConfigError: the batch does not divide into these groups.
        """
        if self._agent.loop is None:
            await self._agent.__aenter__()
        rows = [data[i : i + 1] for i in range(len(data))] if _is_proto(data) else list(data)
        order = _by_group(_uids(data), len(rows), group_size)
        if _is_proto(data) and data.non_tensor_batch.keys() & {"uid", "session_id"} == {"uid"}:
            # So that the rollouts of a prompt have different uids in the records.
            for position, i in enumerate(order):
                rows[i].non_tensor_batch["session_id"] = _array([position % group_size])
        pending = self._agent.submit([rows[i] for i in order], group_size=group_size)
        if rows:
            self._batches.append(_Submitted(pending, order, data, group_size))
        return len(rows)

    async def get(self, chunk_size: int, hook_func: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Wait for the rewards of ``chunk_size`` samples, in whole groups, of the oldest batch that has any left.

        Groups come in order of completion, and inside the answer in order of index. The last chunk of a batch may be
        smaller.

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
            answer = await self._take(chunk_size)
        if hook_func is None:
            return answer
        # In a thread, and without the lock: the hook is user code, which may take long.
        return await asyncio.to_thread(hook_func, *answer, **kwargs)

    async def shutdown(self) -> None:
        """Cancel what has not ended, and close the agent."""
        for batch in self._batches:
            batch.pending.cancel()
        if self._agent.loop is not None:
            await self._agent.__aexit__(None, None, None)

    async def _take(self, chunk_size: int) -> tuple[list[int], Any, dict[str, Any]]:
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
        groups = batch.pending.complete_groups(batch.taken, last)
        # Not before the wait: a call that is cancelled while it waits takes nothing.
        batch.taken += len(groups)
        if batch.taken == batch.pending.group_count:
            self._batches.popleft()
        return batch.answer(groups)


class _Actor(AsyncRewardAgent):
    """The actor itself, which owns its process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        freeze_and_raise_gc_threshold()


RayAsyncRewardAgent = ray.remote(max_concurrency=MAX_CALLS)(_Actor)
"""The actor: ``RayAsyncRewardAgent.remote("reward.py:compute_score")``, or with Ray's ``options(...)`` first."""


@dataclass
class _Submitted:
    """A submitted batch, and how much of it was handed out."""

    pending: PendingRewards
    order: list[int]
    """The index of each of its samples in the caller's batch."""
    data: Any
    """The batch as it was submitted."""
    group_size: int
    taken: int = 0
    """The number of groups that were handed out."""

    def answer(self, groups: list[Group]) -> tuple[list[int], Any, dict[str, Any]]:
        """Return the answer of `AsyncRewardAgent.get` for complete groups."""
        rewards = {
            self.order[i]: reward for group in groups for i, reward in zip(group.indices, group.rewards, strict=True)
        }
        indices = sorted(rewards)
        scores = [rewards[i]["reward_score"] for i in indices]
        infos = _columns([rewards[i] for i in indices])
        if not _is_proto(self.data):
            return indices, scores, infos
        token_rewards = RewardLoopManagerBase.assemble_rm_scores(self.data[indices], scores)
        return indices, token_rewards, {key: _array(column) for key, column in infos.items()}


def _is_proto(data: Any) -> bool:
    return hasattr(data, "batch")


def _columns(rewards: Sequence[Reward]) -> dict[str, list[Any]]:
    """Turn extra infos into columns; None where a sample lacks a key."""
    infos = [reward.get("reward_extra_info") or {} for reward in rewards]
    return {key: [info.get(key) for info in infos] for key in dict.fromkeys(key for info in infos for key in info)}


def _array(column: list[Any]) -> Any:
    import numpy as np

    array = np.empty(len(column), dtype=object)
    array[:] = column
    return array


def _uids(data: Any) -> list[Any] | None:
    if _is_proto(data):
        uids = data.non_tensor_batch.get("uid")
        return None if uids is None else list(uids)
    uids = [getattr(sample, "uid", None) for sample in data]
    return None if None in uids else uids


def _by_group(uids: list[Any] | None, count: int, group_size: int) -> list[int]:
    """Return the sample indices, with the members of each group next to each other."""
    places: dict[Any, list[int]] = {}
    for i, uid in enumerate(uids or ()):
        places.setdefault(uid, []).append(i)
    if len(places) in (0, count):
        return list(range(count))
    wrong = [uid for uid, members in places.items() if len(members) != group_size]
    if wrong:
        raise ConfigError(
            f"samples with the same uid are a group of {group_size}, but {len(places[wrong[0]])} have uid {wrong[0]!r}"
        )
    return [i for members in places.values() for i in members]
