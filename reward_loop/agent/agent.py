"""RewardAgent: batches go in at once, and groups come out as their rewards complete."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from reward_loop.agent.pending import PendingRewards
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError, ScoringError
from reward_loop.managers.post_process import PostProcess
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Reward, RewardSample

__all__ = ["RewardAgent"]

logger = logging.getLogger(__name__)

STARTS_PER_TURN = 32
"""How many samples are started in one turn of the event loop, so that a large batch does not hold up whoever waits for
the loop, or for the interpreter's lock: some milliseconds."""

CLOSING_SECONDS = 5.0
"""How long leaving the agent waits for user code that goes on after it was cancelled."""


class RewardAgent:
    """Scores batches through one reward manager. An async context manager: it owns the tasks that it starts.

    Leaving it cancels what has not ended. An error that ended a batch and that nobody has seen, because nobody
    waited for that batch, is raised then.
    """

    def __init__(
        self,
        manager: Any,
        *,
        concurrency: int | None = None,
        on_ended: Callable[[PendingRewards, int, Reward], None] | None = None,
    ) -> None:
        """Keep the manager.

        Args:
            manager: a reward manager; its ``run_single`` is awaited once for each sample.
            concurrency: how many samples are in work at a time; ``None`` for all.
            on_ended: called on the event loop when a sample has ended, before its group is post-processed: with the
                batch, the sample's place in it, and its reward. For those who keep a journal.

        Raises:
            ConfigError: that is no manager, or no concurrency.
        """
        if not callable(getattr(manager, "run_single", None)):
            raise ConfigError(f"{type(manager).__name__} is no reward manager: it has no method `run_single`")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency: at least 1, or None for no bound; got {concurrency}")
        self.manager = manager
        self.concurrency = concurrency
        self._needs_group: bool = getattr(manager, "needs_group", False)
        self._on_ended = on_ended
        self._options: RewardLoopConfig = getattr(manager, "options", None) or RewardLoopConfig()
        function = getattr(manager, "function", None)
        self._function = function if isinstance(function, ScoringFunction) else None
        self._post_processor = (
            PostProcess(self._function, self._options)
            if self._function is not None and self._function.has_post_process
            else None
        )
        self._batches: dict[int, PendingRewards] = {}
        self._waiting: list[tuple[float, int, PendingRewards]] = []
        self._begun: PendingRewards | None = None
        """The batch of which a group is started in part, where its members wait for each other."""
        self._numbers = itertools.count()
        self._running = 0
        self._tasks: dict[asyncio.Task[None], PendingRewards] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.copy_context()
        self._starting = False
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RewardLoopError("a RewardAgent is entered once: make another one")
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for batch in list(self._batches.values()):
            batch._fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=CLOSING_SECONDS)
            if left:
                logger.warning("%d reward tasks go on although they were cancelled; they are left behind", len(left))
        if callable(close := getattr(self.manager, "close", None)):
            await asyncio.to_thread(close)
        if error is None:
            self._raise_unseen()

    def submit(
        self,
        samples: Iterable[Any],
        *,
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> PendingRewards:
        """Take a batch, and return at once. Must be called on the agent's event loop.

        Args:
            samples: what the manager takes: `RewardSample`, or rows of verl's ``DataProto``. Members of a group are
                neighbours.
            group_size: how many samples each group has; by default each sample is a group of its own.
            groups: the size of each group, where they differ.
            priority: where `concurrency` makes samples wait, those of the batch with the lowest number start first (the
                training step is a good one), and between equal ones those of the batch that was submitted first.
            tag: anything to know the batch by, for instance when it comes back from `restore`.

        Raises:
            ConfigError: the samples do not divide into such groups.
            RewardLoopError: the agent is closed, or was not entered.
        """
        self._check_loop()
        batch = self._take_in(samples, group_size, groups, priority, tag)
        self._go(batch)
        return batch

    def _submit_member(self, sample: Any, priority: float) -> PendingRewards:
        """Take one member of a group that the caller puts together, and has post-processed."""
        self._check_loop()
        batch = self._take_in([sample], None, None, priority, None)
        batch._post_processed = False
        self._go(batch)
        return batch

    def _take_in(
        self, samples: Iterable[Any], group_size: int | None, groups: Sequence[int] | None, priority: float, tag: Any
    ) -> PendingRewards:
        """Keep a batch that is to `_go`; in any thread."""
        rows = list(samples)
        sizes = _sizes(len(rows), group_size, groups)
        if self._needs_group and self.concurrency is not None and max(sizes, default=0) > self.concurrency:
            raise ConfigError(
                f"{type(self.manager).__name__} waits for all samples of a group, and concurrency={self.concurrency} "
                f"starts fewer than the {max(sizes)} that a group has"
            )
        return self._new_batch(rows, sizes, priority, tag)

    async def drain(self) -> None:
        """Wait until all that was submitted has ended, in whichever way."""
        while self._tasks or self._starting:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(0)

    @property
    def running(self) -> int:
        """How many samples are in work."""
        return self._running

    @property
    def waiting(self) -> int:
        """How many samples wait to be started."""
        return sum(len(batch) - batch._next for _, _, batch in self._waiting)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: every batch that has not been delivered, with its samples and finished rewards.

        A batch is delivered when an ``await`` of it has returned, when an iteration over it has come to its end, or
        when it was cancelled or its error was raised. The state holds plain containers and the caller's own samples
        and tags, and shares nothing that changes; pickle it, for example.
        """
        return {
            "version": 1,
            "batches": [
                {
                    "tag": batch.tag,
                    "priority": batch.priority,
                    "groups": [len(batch._members(group)) for group in range(batch.group_count)],
                    "samples": list(batch._samples),
                    "rewards": list(batch._rewards),
                    "completed": list(batch._order),
                }
                for batch in list(self._batches.values())
                if batch._error is None
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> list[PendingRewards]:
        """Take up the batches of a `state`, in their old order; return them.

        Samples that had ended are not judged again, the others are submitted. A restored batch yields all its groups,
        those that were complete first, in their old order.

        Raises:
            ConfigError: it is the state of another version.
        """
        if state.get("version") != 1:
            raise ConfigError(f"this is no state of a RewardAgent that can be restored: version {state.get('version')}")
        self._check_loop()
        batches = []
        for kept in state["batches"]:
            batch = self._new_batch(list(kept["samples"]), kept["groups"], kept["priority"], kept["tag"])
            batch._rewards[:] = kept["rewards"]
            complete = set(kept["completed"])
            for group in kept["completed"]:
                batch._left[group] = 0
                batch._complete(group)
            for group in range(batch.group_count):
                if group not in complete:
                    if self._needs_group:
                        for member in batch._members(group):
                            batch._rewards[member] = None
                    batch._left[group] = sum(batch._rewards[i] is None for i in batch._members(group))
                    if not batch._left[group]:
                        self._all_ended(batch, group)
            self._go(batch)
            batches.append(batch)
        return batches

    def _raise_unseen(self) -> None:
        for batch in self._batches.values():
            if batch._error is not None and not batch._observed:
                raise batch._error

    def _new_batch(self, samples: list[Any], sizes: Sequence[int], priority: float, tag: Any) -> PendingRewards:
        batch = PendingRewards(
            samples,
            sizes,
            number=next(self._numbers),
            priority=priority,
            tag=tag,
            on_cancel=self._cancel,
            on_delivered=self._delivered,
        )
        if self._function is not None and self._function.has_log:
            batch._latencies = array("d", bytes(8 * len(samples)))
            batch._times = array("d", bytes(8 * len(samples)))
        self._batches[batch.number] = batch
        return batch

    def _check_loop(self) -> None:
        if self._loop is None or self._closed:
            raise RewardLoopError(
                "the agent is closed" if self._closed else "enter the agent first: `async with RewardAgent(...)`"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise RewardLoopError("this agent belongs to another event loop; BlockingRewardAgent serves all threads")

    def _go(self, batch: PendingRewards) -> None:
        if self._closed:
            batch._fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        if not batch.done():
            heapq.heappush(self._waiting, (batch.priority, batch.number, batch))
            self._start_soon()

    def _start_soon(self) -> None:
        if self._loop is not None and not self._starting and self._waiting:
            self._starting = True
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        assert self._loop is not None
        self._starting = False
        freed = self._freed
        for _ in range(STARTS_PER_TURN):
            if self.concurrency is not None and self._running >= self.concurrency:
                return
            if (following := self._following()) is None:
                return
            batch, sample = following
            self._running += 1
            self._own(batch, self._loop.create_task(self._score(batch, sample)), freed)
        self._start_soon()

    def _following(self) -> tuple[PendingRewards, int] | None:
        """The sample to start next, and its batch.

        Where the members of a group wait for each other, a group that is begun comes first: several of them, of batches
        of different priorities, could fill all places and wait for ever.
        """
        while self._begun is not None or self._waiting:
            batch = self._waiting[0][2] if self._begun is None else self._begun
            sample = batch._take()
            if sample is not None:
                if self._needs_group:
                    self._begun = batch if sample + 1 < batch._members(batch._group_of(sample)).stop else None
                return batch, sample
            if self._begun is None:
                heapq.heappop(self._waiting)
            self._begun = None
        return None

    def _own(
        self, batch: PendingRewards, task: asyncio.Task[None], ended: Callable[[asyncio.Task[None]], None]
    ) -> None:
        batch._tasks.add(task)
        self._tasks[task] = batch
        # In one context for all: a copy for each is one more object that Python's garbage collector looks at.
        task.add_done_callback(ended, context=self._context)

    def _released(self, task: asyncio.Task[None]) -> None:
        batch = self._tasks.pop(task)
        batch._tasks.discard(task)
        # A task that was cancelled before its first step, by whoever shuts the loop down, has told nobody.
        if task.cancelled():
            batch._fail(RewardsCancelledError("a sample of this batch was cancelled from outside"))
        elif (error := task.exception()) is not None:
            batch._fail(_fault(self.manager, error))

    def _freed(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        self._released(task)
        self._start_soon()

    async def _score(self, batch: PendingRewards, sample: int) -> None:
        started = time.perf_counter()
        try:
            reward = await self.manager.run_single(self._row(batch, sample))
            if not isinstance(reward, Mapping) or "reward_score" not in reward:
                raise TypeError(f"it returned {type(reward).__name__}, not a dict with reward_score")
        except RewardLoopError as error:
            batch._fail(error)
        except asyncio.CancelledError:
            batch._fail(RewardLoopError(f"{type(self.manager).__name__}.run_single was cancelled"))
            raise
        except Exception as error:
            # The manager's own fault, not the reward function's: that one's are data.
            batch._fail(_fault(self.manager, error))
        except BaseException as error:
            batch._fail(_fault(self.manager, error))
            raise
        else:
            if batch._error is not None:
                return
            if batch._latencies is not None and batch._times is not None:
                batch._latencies[sample] = time.perf_counter() - started
                batch._times[sample] = time.time()
            group = batch._ended(sample, reward)  # type: ignore[arg-type]
            if self._on_ended is not None:
                self._on_ended(batch, sample, reward)  # type: ignore[arg-type]
            if group is not None:
                self._all_ended(batch, group)

    def _row(self, batch: PendingRewards, sample: int) -> Any:
        """What the manager gets: a sample knows its group, where the manager must see all of it."""
        row = batch._samples[sample]
        if not self._needs_group or not isinstance(row, RewardSample) or row.group is not None:
            return row
        group = batch._group_of(sample)
        return replace(row, group=f"{batch.number}.{group}", group_size=len(batch._members(group)))

    def _all_ended(self, batch: PendingRewards, group: int) -> None:
        assert self._loop is not None
        if self._post_processor is not None and batch._post_processed:
            self._own(batch, self._loop.create_task(self._post_process(batch, group)), self._released)
        else:
            self._complete(batch, group)

    async def _post_process(self, batch: PendingRewards, group: int) -> None:
        """Hand the rewards of a group to the user's class, and put back what it returns."""
        assert self._post_processor is not None
        members = list(batch._members(group))
        rewards = [reward for i in members if (reward := batch._rewards[i]) is not None]
        names = [getattr(batch._samples[i], "uid", None) for i in members]
        try:
            for i, reward in zip(members, await self._post_processor(rewards, names), strict=True):
                batch._rewards[i] = reward
        except RewardLoopError as error:
            batch._fail(error)
        else:
            if batch._error is None:
                self._complete(batch, group)

    def _complete(self, batch: PendingRewards, group: int) -> None:
        batch._complete(group)
        if batch.done() and batch._latencies is not None:
            assert self._loop is not None
            self._own(batch, self._loop.create_task(self._log(batch)), self._released)

    async def _log(self, batch: PendingRewards) -> None:
        assert self._function is not None
        assert batch._latencies is not None
        assert batch._times is not None
        infos = [(reward.get("reward_extra_info") if reward else None) or {} for reward in batch._rewards]
        replies = [info.get("explanation") for info in infos]
        groups = [group for group in range(batch.group_count) for _ in batch._members(group)]
        try:
            await self._function.log(
                queries=[
                    info.get("prompt", getattr(sample, "solution_str", None))
                    for info, sample in zip(infos, batch._samples, strict=True)
                ],
                replies=replies,
                results=replies,
                scores=[reward["reward_score"] if reward else None for reward in batch._rewards],
                latencies=batch._latencies.tolist(),
                groups=groups,
                group_uids=groups,
                timestamps=[datetime.fromtimestamp(at).isoformat() for at in batch._times],
            )
        except ScoringError as error:
            logger.warning("%s; the rewards are not affected", error)

    def _cancel(self, batch: PendingRewards) -> None:
        batch._fail(RewardsCancelledError("this batch was cancelled before it was complete"))
        self._delivered(batch)

    def _delivered(self, batch: PendingRewards) -> None:
        # Also called in the thread of a blocking caller.
        self._batches.pop(batch.number, None)


def _sizes(count: int, group_size: int | None, groups: Sequence[int] | None) -> Sequence[int]:
    if groups is not None:
        if group_size is not None:
            raise ConfigError("give group_size or groups, not both")
        return groups
    size = 1 if group_size is None else group_size
    if size < 1 or count % size:
        raise ConfigError(f"{count} samples do not divide into groups of {size}: name the sizes, as groups=[...]")
    return [size] * (count // size)


def _fault(manager: Any, error: BaseException) -> RewardLoopError:
    fault = RewardLoopError(f"{type(manager).__name__}.run_single raised {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
