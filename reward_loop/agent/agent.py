"""RewardAgent: submit batches, and receive groups as their rewards complete.

Invariants:

- Every accepted sample ends exactly once: with a reward, or because its batch ended with an error.
- The agent owns every task that it starts, until the task has ended or `_close` has left it behind with a warning.
- At most `concurrency` samples run at a time. Batches with a lower priority number start first. Where the members of
  a group wait for each other, a started group comes before all others: parts of several groups could otherwise hold
  all permits and wait forever.

`BlockingRewardAgent` uses `_accept`, `_start` and `_raise_unseen_error`, `QueuedRewards` uses `_submit_member`. All
other names with an underscore are used here only.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from reward_loop.agent.batch import Batch, group_sizes
from reward_loop.agent.pending import PendingRewards
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError, ScoringError
from reward_loop.managers.post_process import PostProcess
from reward_loop.scoring import ScoringFunction
from reward_loop.types import Reward, RewardSample

__all__ = ["RewardAgent"]

logger = logging.getLogger(__name__)

STARTS_PER_TURN = 32
"""Samples started in one turn of the event loop. Starting a large batch at once would block the loop for too long."""

CLOSING_SECONDS = 5.0
"""How long closing waits for user code that keeps running after its cancellation."""

STATE_VERSION = 1


class RewardAgent:
    """Scores batches through one reward manager. An async context manager: it owns the tasks that it starts.

    Leaving it cancels what has not ended. If an error ended a batch that nobody waited for, leaving raises that error.

    Example:
        async with RewardAgent(manager, concurrency=256) as agent:
            pending = agent.submit(samples, group_size=5)
            async for mini_batch in pending.mini_batches(groups=4):
                train(mini_batch.indices, mini_batch.rewards)
    """

    def __init__(
        self,
        manager: Any,
        *,
        concurrency: int | None = None,
        on_ended: Callable[[Any, int, Reward], None] | None = None,
    ) -> None:
        """Create an agent; enter it before use.

        Args:
            manager: a reward manager; its ``run_single`` is awaited once per sample.
            concurrency: how many samples run at a time; ``None`` for no limit.
            on_ended: called on the event loop when a sample has ended, before its group is post-processed, with the
                batch's tag, the sample's index in the batch and its reward. For example, to keep a journal.

        Raises:
            ConfigError: the manager has no ``run_single``, or the concurrency is below 1.
        """
        if not callable(getattr(manager, "run_single", None)):
            raise ConfigError(f"invalid reward manager {type(manager).__name__}: it has no method `run_single`")
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"concurrency: at least 1, or None for no limit; got {concurrency}")
        self.manager = manager
        """The reward manager."""
        self.concurrency = concurrency
        """How many samples run at a time; ``None`` for no limit."""
        self.running = 0
        """The number of running samples."""
        self._on_ended = on_ended
        self._needs_group: bool = getattr(manager, "needs_group", False)
        function = getattr(manager, "function", None)
        self._logs_to = function if isinstance(function, ScoringFunction) and function.has_log else None
        """The user's function, if it has a ``log``."""
        self._post_process = PostProcess.of(manager)
        self._needs_name = self._needs_group or getattr(manager, "records", None) is not None
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = False
        self._closed = False

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise RewardLoopError("a RewardAgent can be entered only once: create another one")
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if error is None:
            self._raise_unseen_error()

    async def _close(self) -> None:
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

    def _raise_unseen_error(self) -> None:
        """Raise the error of a failed batch whose rewards nobody has awaited, if there is one."""
        for batch in self._batches.values():
            if batch.error is not None and not batch.error_was_raised:
                raise batch.error

    @property
    def waiting(self) -> int:
        """The number of samples that wait to be started."""
        return sum(batch.unstarted for _, _, batch in self._waiting)

    def submit(
        self,
        samples: Iterable[Any],
        *,
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> PendingRewards:
        """Submit a batch; return at once. Call it on the agent's event loop.

        Args:
            samples: `RewardSample`, or rows of verl's ``DataProto``. Members of a group are neighbours.
            group_size: the size of all groups; by default each sample is a group of its own.
            groups: the size of each group, if the sizes differ.
            priority: where `concurrency` makes samples wait, batches with a lower number start first (the training step
                is a good priority); among equal ones, the batch that was submitted first.
            tag: anything that identifies the batch to you, for example after `restore`.

        Raises:
            ConfigError: the samples do not divide into these groups.
            RewardLoopError: the agent is closed, was not entered, or belongs to another event loop.
        """
        self._check_loop()
        batch = self._accept(samples, group_size, groups, priority, tag)
        self._start(batch)
        return PendingRewards(batch)

    def _submit_member(self, sample: Any, priority: float) -> PendingRewards:
        """Submit one member of a group whose others come later; the caller post-processes the group."""
        self._check_loop()
        batch = self._accept([sample], priority=priority)
        batch.post_process = False
        self._start(batch)
        return PendingRewards(batch)

    async def drain(self) -> None:
        """Wait until everything that was submitted has ended."""
        while self._tasks or self._starting:
            if self._tasks:
                await asyncio.wait(self._tasks)
            else:
                await asyncio.sleep(0)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint: every batch that was not delivered, with its samples and the rewards so far.

        A batch is delivered when an ``await`` of it has returned, when an iteration over it has ended, when it was
        cancelled, or when its error was raised. The state contains plain containers and the caller's own samples and
        tags, and shares no mutable object with the agent; pickle it, for example.
        """
        batches = [
            {
                "tag": batch.tag,
                "priority": batch.priority,
                "groups": [len(batch.members(group)) for group in range(batch.group_count)],
                "samples": list(batch.samples),
                "rewards": list(batch.rewards),
                "completed": list(batch.completed_groups),
            }
            for batch in list(self._batches.values())  # other threads submit, through BlockingRewardAgent
            if batch.error is None
        ]
        return {"version": STATE_VERSION, "batches": batches}

    def restore(self, state: Mapping[str, Any]) -> list[PendingRewards]:
        """Resume the batches of a `state`; return them in their old order.

        Samples that had a reward are not scored again; the others are submitted. A restored batch yields all its
        groups: first those that were complete, in their old order.

        Raises:
            ConfigError: the state has another version.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"cannot restore this state: its version is {state.get('version')!r}, expected {STATE_VERSION}"
            )
        self._check_loop()
        restored = []
        for kept in state["batches"]:
            batch = self._new_batch(list(kept["samples"]), kept["groups"], kept["priority"], kept["tag"])
            for group in batch.restore(kept["rewards"], kept["completed"], whole_groups=self._needs_group):
                self._all_ended(batch, group)
            self._start(batch)
            restored.append(PendingRewards(batch))
        return restored

    def _check_loop(self) -> None:
        """Raise a `RewardLoopError` unless the agent is open and this is its event loop."""
        if self._loop is None or self._closed:
            raise RewardLoopError(
                "the agent is closed" if self._closed else "enter the agent first: `async with RewardAgent(...)`"
            )
        if asyncio.get_running_loop() is not self._loop:
            raise RewardLoopError("this agent belongs to another event loop; BlockingRewardAgent serves all threads")

    def _accept(
        self,
        samples: Iterable[Any],
        group_size: int | None = None,
        groups: Sequence[int] | None = None,
        priority: float = 0,
        tag: Any = None,
    ) -> Batch:
        """Register a batch. Safe in any thread; `_start` it on the event loop."""
        rows = list(samples)
        sizes = group_sizes(len(rows), group_size, groups)
        largest = max(sizes, default=0)
        if self._needs_group and self.concurrency is not None and largest > self.concurrency:
            raise ConfigError(
                f"{type(self.manager).__name__} waits for all samples of a group, and a group has {largest} samples: "
                f"concurrency must be at least {largest}, got {self.concurrency}"
            )
        return self._new_batch(rows, sizes, priority, tag)

    def _new_batch(self, samples: list[Any], sizes: Sequence[int], priority: float, tag: Any) -> Batch:
        batch = Batch(samples, sizes, next(self._numbers), priority, tag, self._delivered)
        self._batches[batch.number] = batch
        return batch

    def _delivered(self, batch: Batch) -> None:
        # BlockingPendingRewards also calls this, in the caller's thread.
        self._batches.pop(batch.number, None)

    def _start(self, batch: Batch) -> None:
        """Start the samples of an accepted batch as permits become free."""
        if self._closed:
            batch.fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        if not batch.ended:
            heapq.heappush(self._waiting, (batch.priority, batch.number, batch))
            self._start_soon()

    def _start_soon(self) -> None:
        if not self._starting and self._waiting:
            self._starting = True
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        self._starting = False
        for _ in range(STARTS_PER_TURN):
            if self.concurrency is not None and self.running >= self.concurrency:
                return
            if (following := self._next_sample()) is None:
                return
            batch, sample = following
            self.running += 1
            self._own(batch, asyncio.create_task(self._score(batch, sample)), self._on_sample_done)
        self._start_soon()

    def _next_sample(self) -> tuple[Batch, int] | None:
        while self._begun is not None or self._waiting:
            batch = self._waiting[0][2] if self._begun is None else self._begun
            sample = batch.next_sample()
            if sample is not None:
                if self._needs_group:
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
        """End the batch of a task that ended with an error. A cancelled task may never have run a line of its own."""
        batch = self._tasks.pop(task)
        batch.tasks.discard(task)
        name = f"{type(self.manager).__name__}.run_single"
        if task.cancelled():
            batch.fail(RewardLoopError(f"a sample of this batch was cancelled, from outside or by {name}"))
        elif isinstance(error := task.exception(), RewardLoopError):
            batch.fail(error)
        elif error is not None:
            # A bug in the manager. Errors of the reward function arrive as outcomes instead.
            wrapped = RewardLoopError(f"{name} raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            batch.fail(wrapped)

    def _sample_done(self, task: asyncio.Task[None]) -> None:
        self.running -= 1
        self._task_done(task)
        self._start_soon()

    async def _score(self, batch: Batch, sample: int) -> None:
        started = time.perf_counter()
        reward = await self.manager.run_single(self._row(batch, sample))
        if not isinstance(reward, Mapping) or "reward_score" not in reward:
            raise TypeError(f"it returned {type(reward).__name__}, not a dict with reward_score")
        if batch.error is not None:
            return
        if self._logs_to is not None:
            batch.timings[sample] = time.perf_counter() - started, time.time()
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
        if self._post_process is not None and batch.post_process:
            processing = self._post_process_group(self._post_process, batch, group)
            self._own(batch, asyncio.create_task(processing), self._task_done)
        else:
            self._complete(batch, group)

    async def _post_process_group(self, post_process: PostProcess, batch: Batch, group: int) -> None:
        members = batch.members(group)
        rewards = [reward for i in members if (reward := batch.rewards[i]) is not None]
        processed = await post_process(rewards, [getattr(batch.samples[i], "uid", None) for i in members])
        if batch.error is None:
            batch.rewards[members.start : members.stop] = processed
            self._complete(batch, group)

    def _complete(self, batch: Batch, group: int) -> None:
        batch.complete(group)
        if batch.ended and self._logs_to is not None:
            self._own(batch, asyncio.create_task(self._log(self._logs_to, batch)), self._task_done)

    async def _log(self, function: ScoringFunction, batch: Batch) -> None:
        try:
            await function.log(**batch.log_columns())
        except ScoringError as error:
            logger.warning("%s; the rewards are not affected", error)
