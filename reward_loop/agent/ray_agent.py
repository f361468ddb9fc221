"""The agent as a Ray actor, with the method names of the async reward agent that was proposed for verl (verl#2854).

If the actor is killed, Ray starts it again and repeats the unanswered calls. The new process restores its batches from
a `Journal` in another actor. Samples that had a reward are not scored again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from reward_loop._util.garbage_collector import freeze_and_raise_threshold
from reward_loop.agent.agent import RewardAgent
from reward_loop.agent.batch import group_sizes
from reward_loop.agent.journal import Entry, Journal
from reward_loop.agent.pending import Group, PendingRewards
from reward_loop.config import RewardLoopConfig, parse
from reward_loop.errors import ConfigError, RewardLoopError
from reward_loop.managers import RewardLoopManagerBase
from reward_loop.managers.scorer import load_scorer
from reward_loop.types import Reward

__all__ = ["AsyncRewardAgent", "RayAsyncRewardAgent"]

MAX_CALLS = 100_000
"""Concurrent calls of the actor. Calls only wait, so this does not limit scoring."""

MAX_STARTS = 4
"""How often the process of the actor is started without one new reward in between."""


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
        """
        scorer = load_scorer(
            compute_score,
            manager,
            parse(RewardLoopConfig, config, "config"),
            reward_kwargs=reward_kwargs,
            tokenizer=tokenizer,
            router_address=reward_router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
        self._agent = RewardAgent(scorer.manager, concurrency=concurrency, on_ended=self._ended)
        self._started = asyncio.Lock()
        self._entered = False
        self._taking = asyncio.Lock()
        self._batches: dict[str, _Batch] = {}
        self._journal = Journal()
        self._arguments: Any = None
        self._copy: Any = None
        """The handle of the `Journal` actor."""
        self._unsaved: dict[str, dict[int, Reward]] = {}
        self._saving: asyncio.Task[None] | None = None

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
        call = self._call()
        await self._start()
        if len(data) and call not in self._batches:
            entry = Entry(data, group_size)
            self._batches[call] = self._take_up(call, entry)
            await self._note("submitted", call, entry)
        return len(data)

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
        call = self._call()
        await self._start()
        async with self._taking:
            batch, groups = self._answered(call) or await self._take(call, chunk_size)
        answer = batch.answer(groups)
        if hook_func is None:
            return answer
        return await asyncio.to_thread(hook_func, *answer, **kwargs)

    async def shutdown(self) -> None:
        """Cancel what has not ended, and close the agent."""
        for batch in self._batches.values():
            batch.pending.cancel()
        if self._entered:
            await self._agent.__aexit__(None, None, None)
        if self._saving is not None:
            await self._saving

    async def _start(self) -> None:
        """Open the agent, and restore the batches of the process before this one."""
        async with self._started:
            if self._entered:
                return
            await self._agent.__aenter__()
            if self._copy is not None:
                self._journal.replace(await self._copy.entries.remote(), self._arguments)
            for name, entry in self._journal.entries().items():
                self._batches[name] = self._take_up(name, entry)
            self._entered = True

    def _take_up(self, name: str, entry: Entry) -> _Batch:
        data = entry.data
        rows = [data[i : i + 1] for i in range(len(data))] if _is_proto(data) else list(data)
        order = _by_group(_uids(data), len(rows), entry.group_size)
        kept = {
            "tag": name,
            "priority": 0,
            "groups": group_sizes(len(rows), entry.group_size, None),
            "samples": [rows[i] for i in order],
            "rewards": [entry.rewards.get(i) for i in range(len(rows))],
            "completed": entry.handed_out,
        }
        (pending,) = self._agent.restore({"version": 1, "batches": [kept]})
        return _Batch(pending, order, entry)

    def _answered(self, call: str) -> tuple[_Batch, list[Group]] | None:
        """The groups that an earlier process handed out to this call, if it was killed before the answer arrived."""
        for batch in self._batches.values():
            if call in batch.entry.answers:
                groups = set(batch.entry.answers[call])
                return batch, [group for group in batch.pending.complete_groups() if group.index in groups]
        return None

    async def _take(self, call: str, chunk_size: int) -> tuple[_Batch, list[Group]]:
        batch = next((batch for batch in self._batches.values() if batch.left), None)
        if batch is None:
            raise RewardLoopError("nothing to get: every submitted batch has been taken")
        size = batch.entry.group_size
        if chunk_size < 1 or chunk_size % size:
            raise ConfigError(f"chunk_size {chunk_size} is not a multiple of the group size {size}")
        try:
            groups = await batch.next_groups(chunk_size // size)
        except RewardLoopError:
            del self._batches[batch.pending.tag]
            await self._note("dropped", batch.pending.tag)
            raise
        rewards = {i: reward for group in groups for i, reward in zip(group.indices, group.rewards, strict=True)}
        await self._note("handed_out", batch.pending.tag, call, [group.index for group in groups], rewards)
        self._batches = {name: self._batches[name] for name in self._journal.entries()}
        return batch, groups

    def _ended(self, batch: str, sample: int, reward: Reward) -> None:
        self._unsaved.setdefault(batch, {})[sample] = reward
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save())

    async def _save(self) -> None:
        """Record new rewards in the journal. Rewards that arrive during one call are recorded together by the next."""
        while self._unsaved:
            unsaved, self._unsaved = self._unsaved, {}
            await self._note("ended", unsaved)

    async def _note(self, what: str, *facts: Any) -> None:
        getattr(self._journal, what)(*facts)
        if self._copy is not None and not await getattr(self._copy, what).remote(*facts):
            # The journal was restarted empty.
            await self._copy.replace.remote(self._journal.entries(), self._arguments)

    def _call(self) -> str:
        """The name of the current call; a repeated call keeps its name."""
        return uuid.uuid4().hex


class _DurableAgent(AsyncRewardAgent):
    """The actor itself. The journal also stores its arguments, because Ray does not keep large arguments."""

    def __init__(self, journal: str) -> None:
        copy = ray.get_actor(journal)
        arguments = ray.get(copy.arguments.remote())
        if arguments is None:
            raise RewardLoopError(
                "this agent and its journal were both killed: rewards that were not handed out are lost"
            )
        if ray.get(copy.started.remote()) > MAX_STARTS:
            raise RewardLoopError(
                f"this agent died {MAX_STARTS} times with no new reward in between: does the reward function "
                "crash the interpreter, or run out of memory?"
            )
        positional, named = arguments
        super().__init__(*positional, **named)
        self._copy, self._arguments = copy, arguments
        freeze_and_raise_threshold()

    def _call(self) -> str:
        name: str = ray.get_runtime_context().get_task_id()
        return name


class _ActorClass:
    """Like ``ray.remote(AsyncRewardAgent)``, but each actor gets a journal actor."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def options(self, **options: Any) -> _ActorClass:
        """Return a copy with more of Ray's options."""
        return _ActorClass(**(self._options | options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start an `AsyncRewardAgent` with these arguments; return its handle.

        The journal lives as long as this process keeps that handle.
        """
        name = f"reward-journal-{uuid.uuid4().hex}"
        journal: Any = ray.remote(Journal).options(name=name, num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        ray.get(journal.replace.remote({}, (args, kwargs)))
        agent = ray.remote(_DurableAgent).options(**self._options).remote(name)
        agent.journal = journal
        return agent


RayAsyncRewardAgent = _ActorClass(max_concurrency=MAX_CALLS, max_restarts=-1, max_task_retries=-1)
"""The actor: ``RayAsyncRewardAgent.remote("reward.py:compute_score")``, or with Ray's ``options(...)`` first."""


@dataclass
class _Batch:
    """A batch and its groups that were handed out."""

    pending: PendingRewards
    """Its tag is the name of the batch."""
    order: list[int]
    """The index of each of its samples in the caller's batch."""
    entry: Entry

    @property
    def left(self) -> int:
        """The number of groups that were not handed out."""
        return self.pending.group_count - len(self.entry.handed_out)

    async def next_groups(self, count: int) -> list[Group]:
        """Wait for ``count`` groups, or for all that are left. A cancelled call takes none."""
        first = len(self.entry.handed_out)
        await self.pending.wait(first + count)
        groups = self.pending.complete_groups(first, first + count)
        if len(groups) == self.left:
            await self.pending
        return groups

    def answer(self, groups: list[Group]) -> tuple[list[int], Any, dict[str, Any]]:
        rewards = {
            self.order[i]: reward for group in groups for i, reward in zip(group.indices, group.rewards, strict=True)
        }
        indices = sorted(rewards)
        scores = [rewards[i]["reward_score"] for i in indices]
        infos = _columns([rewards[i] for i in indices])
        if not _is_proto(self.entry.data):
            return indices, scores, infos
        token_rewards = RewardLoopManagerBase.assemble_rm_scores(self.entry.data[indices], scores)
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
