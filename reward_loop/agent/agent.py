"""`RewardAgent`, and `BlockingRewardAgent` for synchronous programs: submit batches, and receive complete groups.

Invariants:

- Every accepted sample ends exactly once: with a reward, or because its batch ended with an error.
- The agent owns every task that it starts, until the task has ended or closing has left it behind with a warning.
- Samples start in order of submission, at most `concurrency` at a time. The members of a group are neighbours, so a
  group starts before all later ones, and managers that wait for a whole group cannot block each other.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import logging
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from reward_loop._util.bounded_tasks import BoundedTasks
from reward_loop._util.event_loops import in_background
from reward_loop.agent.pending import Group, MiniBatch, PendingRewards, group_sizes
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.managers.scorer import scored
from reward_loop.types import Reward, RewardSample

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 5.0
"""How long closing waits for user code that keeps running after its cancellation."""


class RewardAgent:
    """Scores batches through one reward manager. An async context manager: it owns the tasks that it starts.

    Leaving it cancels what has not ended, and closes the manager: give each agent a manager of its own. If an error
    ended a batch that was never awaited, leaving raises that error.

    Example:
        async with RewardAgent(manager, concurrency=256) as agent:
            pending = agent.submit(samples, group_size=5)
            async for mini_batch in pending.mini_batches(groups=4):
                train(mini_batch.indices, mini_batch.rewards)
    """

    def __init__(self, manager: Any, *, concurrency: int | None = None) -> None:
        """Create an agent; enter it before use.

        Args:
            manager: a reward manager; its ``run_single`` is awaited once per sample.
            concurrency: how many samples run at a time; ``None`` for no limit.

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
        self._needs_group: bool = getattr(manager, "needs_group", False)
        names_samples = getattr(manager, "records", None) is not None or "uid" in getattr(manager, "requires", ())
        self._names_groups = self._needs_group or names_samples
        self._name = secrets.token_hex(4)
        """Part of the names of groups: several runs may record samples in one folder."""
        self._unsettled: set[PendingRewards] = set()
        """Batches that have not ended, and those whose error was not read yet."""
        self._unstarted: deque[tuple[PendingRewards, int]] = deque()
        """The samples that wait to be started."""
        self._numbers = itertools.count()
        self._batches: dict[asyncio.Task[None], PendingRewards] = {}
        """The batch of each running sample, by its task."""
        self._tasks = BoundedTasks(self._start_one, self._ended, concurrency)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which the agent was entered; ``None`` before."""
        self._closed = False

    async def __aenter__(self) -> Self:
        if self.loop is not None:
            raise RewardLoopError("a RewardAgent can be entered only once: create another one")
        self.loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._closed = True
        # A copy: `_fail` removes the batch.
        for pending in list(self._unsettled):
            pending._fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        await close_manager(self.manager, self._tasks)
        if error is None:
            self._raise_unseen_error()

    def _raise_unseen_error(self) -> None:
        """Raise the error of a failed batch whose rewards nobody has awaited, if there is one."""
        for pending in self._unsettled:
            if pending.error is not None:
                raise pending.error

    @property
    def running(self) -> int:
        """The number of running samples."""
        return len(self._tasks.tasks)

    @property
    def waiting(self) -> int:
        """The number of samples that wait to be started."""
        return len(self._unstarted)

    def submit(
        self, samples: Iterable[Any], *, group_size: int | None = None, groups: Sequence[int] | None = None
    ) -> PendingRewards:
        """Submit a batch; return at once. Call it on the agent's event loop.

        Args:
            samples: `RewardSample`, or rows of verl's ``DataProto``. Members of a group are neighbours.
            group_size: the size of all groups; by default each sample is a group of its own.
            groups: the size of each group, if the sizes differ.

        Raises:
            ConfigError: the samples do not divide into these groups.
            RewardLoopError: the agent is closed, was not entered, or belongs to another event loop.
        """
        if self.loop is None or self._closed:
            raise RewardLoopError(
                "the agent is closed" if self._closed else "enter the agent first: `async with RewardAgent(...)`"
            )
        if asyncio.get_running_loop() is not self.loop:
            raise RewardLoopError("this agent belongs to another event loop; BlockingRewardAgent serves all threads")
        pending = self._accept(samples, group_size, groups)
        self._start(pending)
        return pending

    async def drain(self) -> None:
        """Wait until everything that was submitted has ended."""
        await self._tasks.drain()

    def _accept(
        self, samples: Iterable[Any], group_size: int | None = None, groups: Sequence[int] | None = None
    ) -> PendingRewards:
        """Register a batch. Safe in any thread; `_start` it on the event loop."""
        rows = list(samples)
        sizes = group_sizes(len(rows), group_size, groups)
        largest = max(sizes, default=0)
        holds_places = self._needs_group and not getattr(self.manager, "post_processes", False)
        if holds_places and self.concurrency is not None and largest > self.concurrency:
            raise ConfigError(
                f"{type(self.manager).__name__} waits for all samples of a group, and a group has {largest} samples: "
                f"concurrency must be at least {largest}, got {self.concurrency}"
            )
        has_sizes = group_size is not None or groups is not None
        pending = PendingRewards(rows, sizes, next(self._numbers), has_sizes, self._batches, self._unsettled.discard)
        if not pending.done():
            # Atomic, as `next` is: a BlockingRewardAgent accepts batches in its caller's threads.
            self._unsettled.add(pending)
        return pending

    def _start(self, pending: PendingRewards) -> None:
        """Start the samples of an accepted batch when it is their turn."""
        # The agent may have been closed since `_accept`, which runs in the threads of a BlockingRewardAgent's callers.
        if self._closed:
            pending._fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        self._unstarted.extend((pending, sample) for sample in range(len(pending)))
        self._tasks.fill()

    def _start_one(self) -> asyncio.Task[None] | None:
        while self._unstarted:
            pending, sample = self._unstarted.popleft()
            # An ended batch leaves its samples in the queue: to search for them then would take longer.
            if pending.error is None:
                task = asyncio.create_task(self._score(pending, sample))
                self._batches[task] = pending
                return task
        return None

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the batch of a task that ended with an error."""
        pending = self._batches.pop(task)
        # `_fail` has no effect if the batch has ended, and has cancelled this task itself. Errors of the user's
        # function do not arrive here, but as outcomes.
        if task.cancelled():  # it may never have run a line of its own
            name = f"{type(self.manager).__name__}.run_single"
            pending._fail(RewardLoopError(f"a sample of this batch was cancelled, from outside or by {name}"))
        elif (error := task.exception()) is not None:
            if not isinstance(error, RewardLoopError):
                cause, error = error, RewardLoopError(f"a sample could not be scored: {type(error).__name__}: {error}")
                error.__cause__ = cause
            pending._fail(error)

    async def _score(self, pending: PendingRewards, sample: int) -> None:
        row = self._row(pending, sample)
        if self._needs_group:
            task = asyncio.current_task()
            assert task is not None
            release = functools.partial(self._tasks.release, task)
            group = (pending.number, pending._group_of(sample)) if pending.has_sizes else None
            CALLER.set(Caller(reports_lost=pending.has_sizes, group=group, release=release))
        result, reward = await scored(self.manager, row, getattr(row, "uid", None) or f"sample {sample}")
        pending._add(sample, result, reward)

    def _row(self, pending: PendingRewards, sample: int) -> Any:
        """The sample as the manager receives it: with uid and group, if function, manager or records need them."""
        row = pending._samples[sample]
        if not self._names_groups:
            return row
        number = pending._group_of(sample)
        members = pending._members(number)
        group, member = f"{self._name}.{pending.number}.{number}", sample - members.start
        # Of a group with a name of its own, the caller may submit the others later.
        size = len(members) if pending.has_sizes else None
        if isinstance(row, RewardSample):
            return replace(
                row,
                uid=row.uid or f"{group}_{member}",
                group=group if row.group is None else row.group,
                group_size=size or row.group_size or (1 if row.group is None else None),
            )
        if not hasattr(row, "non_tensor_batch"):
            return row
        named, columns = copy.copy(row), row.non_tensor_batch
        named.non_tensor_batch = {"uid": [group], "session_id": [member], **columns}
        if size is not None or "uid" not in columns:
            named.non_tensor_batch["group_size"] = [size or 1]
        return named


async def close_manager(manager: Any, scoring: BoundedTasks | None = None) -> None:
    """Cancel the tasks that score samples, and close a manager that has a ``close``.

    It is closed in a thread, because closing may wait for processes. The tasks have `CLOSING_SECONDS` to end.
    """
    if scoring is not None and (left := await scoring.end(CLOSING_SECONDS)):
        logger.warning("%d reward tasks still run after their cancellation; they are no longer awaited", left)
    if not callable(close := getattr(manager, "close", None)):
        return
    try:
        closing = asyncio.get_running_loop().run_in_executor(None, close)
    except RuntimeError:  # the interpreter is exiting and starts no more threads; nothing else needs the loop
        close()
    else:
        await closing


class BlockingRewardAgent:
    """`RewardAgent` without ``async``: a context manager with the same `submit`.

    Samples are scored in the background while the caller trains. Leaving it closes the manager, as for `RewardAgent`.
    """

    def __init__(self, manager: Any, *, concurrency: int | None = None) -> None:
        """Create an agent; see `RewardAgent` for the arguments."""
        self._agent = RewardAgent(manager, concurrency=concurrency)
        self._stack = ExitStack()
        self._pid: int | None = None

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._stack.enter_context(in_background(lambda: self._agent, name="reward-agent"))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()
        if error is None:
            # `in_background` exits the agent by cancellation, after which the agent raises no error of a batch.
            self._agent._raise_unseen_error()

    def submit(
        self, samples: Iterable[Any], *, group_size: int | None = None, groups: Sequence[int] | None = None
    ) -> BlockingPendingRewards:
        """Submit a batch; return at once. See `RewardAgent.submit`."""
        loop = self._open_loop()
        # Registered in this thread, so that the caller does not wait for the event loop.
        pending = self._agent._accept(samples, group_size, groups)
        loop.call_soon_threadsafe(self._agent._start, pending)
        return BlockingPendingRewards(pending, self)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        loop = self._agent.loop
        if loop is None:
            raise RewardLoopError("enter the agent first: `with BlockingRewardAgent(...)`")
        if loop.is_closed():
            raise RewardLoopError("the agent is closed")
        if self._pid != os.getpid():  # a fork does not copy the thread of the event loop: the call would never end
            raise RewardLoopError(
                "this agent belongs to the process that entered it: create another one in the forked process"
            )
        return loop


class BlockingPendingRewards:
    """`PendingRewards` without ``async``."""

    def __init__(self, pending: PendingRewards, agent: BlockingRewardAgent) -> None:
        self._pending = pending
        self._agent = agent

    @property
    def group_count(self) -> int:
        """The number of groups."""
        return self._pending.group_count

    def done(self) -> bool:
        """Whether all groups are complete, or an error or `cancel` has ended the batch."""
        return self._pending.done()

    def complete_groups(self, first: int = 0, last: int | None = None) -> list[Group]:
        """Return the complete groups ``first`` to ``last - 1``, counted in order of completion."""
        return self._pending.complete_groups(first, last)

    def cancel(self) -> None:
        """Cancel the samples that have not ended."""
        if not self.done():
            # On the event loop: only there may the state of a batch change.
            self._agent._open_loop().call_soon_threadsafe(self._pending.cancel)

    def result(self, timeout: float | None = None) -> list[Reward]:
        """Wait for all rewards, in order of submission; raise `TimeoutError` after ``timeout`` seconds.

        After that, the batch continues, and you can wait again.
        """
        self._wait(self._pending.group_count, timeout)
        return [scored[1] for scored in self._pending._scored if scored is not None]

    def mini_batches(self, groups: int) -> Iterator[MiniBatch]:
        """Yield mini-batches of ``groups`` groups as they complete; the last one may have fewer."""
        if groups < 1:
            raise ConfigError(f"a mini-batch needs at least one group, not {groups}")
        for first in range(0, self._pending.group_count, groups):
            self._wait(first + groups, None)
            yield MiniBatch(tuple(self._pending.complete_groups(first, first + groups)))

    def _wait(self, groups: int, timeout: float | None) -> None:
        if not self._pending._has(groups):
            self._agent._open_loop()  # raises if nothing would ever end the wait
        self._pending._wait_in_thread(groups, timeout)
