"""Runs the samples of batches through one reward manager, on one event loop.

`RewardAgent` and `BlockingRewardAgent` are its two faces.

Invariants:

- Every accepted sample ends exactly once: with a reward, or because its batch ended with an error.
- The runner owns every task that it starts, until the task has ended or `close` has left it behind with a warning.
- At most `concurrency` samples run at a time. Batches with a lower priority number start first. Where the members of
  a group wait for each other, a started group comes before all others: parts of several groups could otherwise hold
  all permits and wait forever.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from reward_loop.agent.batch import Batch, group_sizes
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError, ScoringError
from reward_loop.managers.post_process import PostProcess
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Reward, RewardSample

__all__ = ["BatchRunner"]

logger = logging.getLogger(__name__)

STARTS_PER_TURN = 32
"""Samples started in one turn of the event loop. Starting a large batch at once would block the loop for too long."""

CLOSING_SECONDS = 5.0
"""How long `close` waits for user code that keeps running after its cancellation."""

STATE_VERSION = 1


class BatchRunner:
    """Starts samples, collects their rewards, post-processes groups and calls the user's ``log``."""

    def __init__(
        self, manager: Any, *, concurrency: int | None, on_ended: Callable[[Any, int, Reward], None] | None
    ) -> None:
        """Check the manager; see `RewardAgent` for the arguments."""
        if not callable(getattr(manager, "run_single", None)):
            raise ConfigError(f"invalid reward manager {type(manager).__name__}: it has no method `run_single`")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency: at least 1, or None for no limit; got {concurrency}")
        self.manager = manager
        self.concurrency = concurrency
        self.needs_group: bool = getattr(manager, "needs_group", False)
        self.running = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.post_processor: PostProcess | None = None
        self._on_ended = on_ended
        function = getattr(manager, "function", None)
        self._function = function if isinstance(function, ScoringFunction) else None
        if self._function is not None and self._function.has_post_process:
            options: RewardLoopConfig = getattr(manager, "options", None) or RewardLoopConfig()
            self.post_processor = PostProcess(self._function, options)
        self._needs_name = self.needs_group or getattr(manager, "records", None) is not None
        self._name = secrets.token_hex(4)
        """Part of the names of groups: several runs may record samples in one folder."""
        self._batches: dict[int, Batch] = {}
        self._waiting: list[tuple[float, int, Batch]] = []
        self._begun: Batch | None = None
        """The batch whose current group has started in part, if members of a group wait for each other."""
        self._numbers = itertools.count()
        self._tasks: dict[asyncio.Task[None], Batch] = {}
        # One context and one bound method for all tasks: with one each per task, the garbage collector would visit
        # two more objects for each sample in flight.
        self._context = contextvars.copy_context()
        self._on_sample_done = self._sample_done
        self._starting = False
        self._closed = False

    def open(self) -> None:
        """Bind to the running event loop."""
        if self.loop is not None:
            raise RewardLoopError("a RewardAgent can be entered only once: create another one")
        self.loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Cancel what has not ended, and close the manager."""
        self._closed = True
        for batch in list(self._batches.values()):
            batch.fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=CLOSING_SECONDS)
            if left:
                logger.warning(
                    "%d reward tasks still run after their cancellation; the agent no longer waits for them", len(left)
                )
        if callable(close := getattr(self.manager, "close", None)):
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, close)
            except RuntimeError:  # the interpreter is exiting and starts no more threads; nothing else needs the loop
                close()
            else:
                await closing

    def raise_unseen_error(self) -> None:
        """Raise an error that ended a batch nobody waited for."""
        for batch in self._batches.values():
            if batch.error is not None and not batch.error_was_raised:
                raise batch.error

    @property
    def waiting(self) -> int:
        """The number of samples that wait to be started."""
        return sum(batch.unstarted for _, _, batch in self._waiting)

    def check_loop(self) -> None:
        """Raise a `RewardLoopError` unless the runner is open and this is its event loop."""
        if self.loop is None or self._closed:
            raise RewardLoopError(
                "the agent is closed" if self._closed else "enter the agent first: `async with RewardAgent(...)`"
            )
        if asyncio.get_running_loop() is not self.loop:
            raise RewardLoopError("this agent belongs to another event loop; BlockingRewardAgent serves all threads")

    def accept(
        self,
        samples: Iterable[Any],
        *,
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> Batch:
        """Register a batch. Safe in any thread; `start` it on the event loop."""
        rows = list(samples)
        sizes = group_sizes(len(rows), group_size, groups)
        largest = max(sizes, default=0)
        if self.needs_group and self.concurrency is not None and largest > self.concurrency:
            raise ConfigError(
                f"{type(self.manager).__name__} waits for all samples of a group, and a group has {largest} samples: "
                f"concurrency must be at least {largest}, got {self.concurrency}"
            )
        return self._new_batch(rows, sizes, priority, tag)

    def start(self, batch: Batch) -> None:
        """Start the samples of an accepted batch as permits become free."""
        if self._closed:
            batch.fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        if not batch.ended:
            heapq.heappush(self._waiting, (batch.priority, batch.number, batch))
            self._start_soon()

    async def drain(self) -> None:
        """Wait until every started batch has ended."""
        while self._tasks or self._starting:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(0)

    def state(self) -> dict[str, Any]:
        """The checkpoint that `RewardAgent.state` documents."""
        return {
            "version": STATE_VERSION,
            "batches": [
                {
                    "tag": batch.tag,
                    "priority": batch.priority,
                    "groups": [len(batch.members(group)) for group in range(batch.group_count)],
                    "samples": list(batch.samples),
                    "rewards": list(batch.rewards),
                    "completed": list(batch.completed_groups),
                }
                for batch in list(self._batches.values())
                if batch.error is None
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> list[Batch]:
        """Accept and start the batches of a checkpoint."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"cannot restore this state: its version is {state.get('version')!r}, expected {STATE_VERSION}"
            )
        self.check_loop()
        batches = []
        for kept in state["batches"]:
            batch = self._new_batch(list(kept["samples"]), kept["groups"], kept["priority"], kept["tag"])
            for group in batch.restore(kept["rewards"], kept["completed"], whole_groups=self.needs_group):
                self._all_ended(batch, group)
            self.start(batch)
            batches.append(batch)
        return batches

    def _new_batch(self, samples: list[Any], sizes: Sequence[int], priority: float, tag: Any) -> Batch:
        batch = Batch(
            samples,
            sizes,
            number=next(self._numbers),
            priority=priority,
            tag=tag,
            on_cancel=self._cancel,
            on_delivered=self._delivered,
        )
        if self._function is not None and self._function.has_log:
            batch.latencies = array("d", bytes(8 * len(samples)))
            batch.times = array("d", bytes(8 * len(samples)))
        self._batches[batch.number] = batch
        return batch

    def _start_soon(self) -> None:
        if self.loop is not None and not self._starting and self._waiting:
            self._starting = True
            self.loop.call_soon(self._start_some)

    def _start_some(self) -> None:
        assert self.loop is not None
        self._starting = False
        for _ in range(STARTS_PER_TURN):
            if self.concurrency is not None and self.running >= self.concurrency:
                return
            if (following := self._next_sample()) is None:
                return
            batch, sample = following
            self.running += 1
            self._own(batch, self.loop.create_task(self._score(batch, sample)), self._on_sample_done)
        self._start_soon()

    def _next_sample(self) -> tuple[Batch, int] | None:
        while self._begun is not None or self._waiting:
            batch = self._waiting[0][2] if self._begun is None else self._begun
            sample = batch.next_sample()
            if sample is not None:
                if self.needs_group:
                    self._begun = batch if sample + 1 < batch.members(batch.group_of(sample)).stop else None
                return batch, sample
            if self._begun is None:
                heapq.heappop(self._waiting)
            self._begun = None
        return None

    def _own(self, batch: Batch, task: asyncio.Task[None], done: Callable[[asyncio.Task[None]], None]) -> None:
        batch.tasks.add(task)
        self._tasks[task] = batch
        task.add_done_callback(done, context=self._context)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        batch = self._tasks.pop(task)
        batch.tasks.discard(task)
        # A task that is cancelled before its first step never runs its own error handling.
        if task.cancelled():
            batch.fail(RewardsCancelledError("a sample of this batch was cancelled from outside"))
        elif (error := task.exception()) is not None:
            batch.fail(_manager_error(self.manager, error))

    def _sample_done(self, task: asyncio.Task[None]) -> None:
        self.running -= 1
        self._task_done(task)
        self._start_soon()

    async def _score(self, batch: Batch, sample: int) -> None:
        started = time.perf_counter()
        try:
            reward = await self.manager.run_single(self._row(batch, sample))
            if not isinstance(reward, Mapping) or "reward_score" not in reward:
                raise TypeError(f"it returned {type(reward).__name__}, not a dict with reward_score")
        except RewardLoopError as error:
            batch.fail(error)
        except asyncio.CancelledError:
            batch.fail(RewardLoopError(f"{type(self.manager).__name__}.run_single was cancelled"))
            raise
        except Exception as error:
            # A bug in the manager. Errors of the reward function arrive as outcomes instead.
            batch.fail(_manager_error(self.manager, error))
        except BaseException as error:
            batch.fail(_manager_error(self.manager, error))
            raise
        else:
            if batch.error is not None:
                return
            if batch.latencies is not None and batch.times is not None:
                batch.latencies[sample] = time.perf_counter() - started
                batch.times[sample] = time.time()
            group = batch.add_reward(sample, reward)  # type: ignore[arg-type]
            if self._on_ended is not None:
                self._on_ended(batch.tag, sample, reward)  # type: ignore[arg-type]
            if group is not None:
                self._all_ended(batch, group)

    def _row(self, batch: Batch, sample: int) -> Any:
        """The sample as the manager receives it: with its group, if the manager needs the whole group or records it."""
        row = batch.samples[sample]
        if not self._needs_name or not isinstance(row, RewardSample) or row.group is not None:
            return row
        group = batch.group_of(sample)
        name = f"{self._name}.{batch.number}.{group}"
        return replace(row, group=name, group_size=len(batch.members(group)))

    def _all_ended(self, batch: Batch, group: int) -> None:
        """Post-process a group whose members all have a reward, then complete it."""
        assert self.loop is not None
        if self.post_processor is not None and batch.post_process:
            self._own(batch, self.loop.create_task(self._post_process(batch, group)), self._task_done)
        else:
            batch.complete(group)
            self._log_if_done(batch)

    async def _post_process(self, batch: Batch, group: int) -> None:
        assert self.post_processor is not None
        members = batch.members(group)
        rewards = [reward for i in members if (reward := batch.rewards[i]) is not None]
        names = [getattr(batch.samples[i], "uid", None) for i in members]
        try:
            for i, reward in zip(members, await self.post_processor(rewards, names), strict=True):
                batch.rewards[i] = reward
        except RewardLoopError as error:
            batch.fail(error)
        else:
            if batch.error is None:
                batch.complete(group)
                self._log_if_done(batch)

    def _log_if_done(self, batch: Batch) -> None:
        if batch.ended and batch.latencies is not None:
            assert self.loop is not None
            self._own(batch, self.loop.create_task(self._log(batch)), self._task_done)

    async def _log(self, batch: Batch) -> None:
        """Call the user's ``log`` with the columns that docs/agent.md describes."""
        assert self._function is not None
        assert batch.latencies is not None
        assert batch.times is not None
        infos = [(reward.get("reward_extra_info") if reward else None) or {} for reward in batch.rewards]
        replies = [info.get("explanation") for info in infos]
        groups = [group for group in range(batch.group_count) for _ in batch.members(group)]
        try:
            await self._function.log(
                queries=[
                    info.get("prompt", getattr(sample, "solution_str", None))
                    for info, sample in zip(infos, batch.samples, strict=True)
                ],
                replies=replies,
                results=replies,
                scores=[reward["reward_score"] if reward else None for reward in batch.rewards],
                latencies=batch.latencies.tolist(),
                groups=groups,
                group_uids=groups,
                timestamps=[datetime.fromtimestamp(at).isoformat() for at in batch.times],
            )
        except ScoringError as error:
            logger.warning("%s; the rewards are not affected", error)

    def _cancel(self, batch: Batch) -> None:
        batch.fail(RewardsCancelledError("this batch was cancelled before it was complete"))
        self._delivered(batch)

    def _delivered(self, batch: Batch) -> None:
        # BlockingPendingRewards also calls this, in the caller's thread.
        self._batches.pop(batch.number, None)


def _manager_error(manager: Any, error: BaseException) -> RewardLoopError:
    wrapped = RewardLoopError(f"{type(manager).__name__}.run_single raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
