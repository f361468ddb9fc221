"""`RewardAgent`: submit batches, and receive groups as their rewards complete.

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
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

from reward_loop._util.bounded_tasks import BoundedTasks
from reward_loop.agent.pending import PendingRewards, group_sizes
from reward_loop.errors import ConfigError, RewardLoopError, RewardsCancelledError
from reward_loop.managers.groups import CALLER, Caller
from reward_loop.managers.scorer import scored
from reward_loop.records import STEP, Interval, Records, WaitsFor, seconds_of
from reward_loop.types import RewardSample

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
        records = getattr(manager, "records", None)
        self._events = StepEvents(records if isinstance(records, Records) else None)
        self._names_groups = self._needs_group or records is not None or "uid" in getattr(manager, "requires", ())
        self._name = secrets.token_hex(4)
        """Part of the names of groups: several runs may record samples in one folder."""
        self._unsettled: dict[int, PendingRewards] = {}
        """Batches that have not ended, and those whose error nobody has received, by their number."""
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
        for pending in list(self._unsettled.values()):
            pending._fail(RewardsCancelledError("the agent was closed before this batch was complete"))
        await close_manager(self.manager, self._tasks)
        if error is None:
            self._raise_unseen_error()

    def _raise_unseen_error(self) -> None:
        """Raise the error of a failed batch whose rewards nobody has awaited, if there is one."""
        for pending in self._unsettled.values():
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

    def step(self, number: int) -> AbstractContextManager[None]:
        """Record the ``with`` block as a training step in the manager's records; nothing without ``log_dir``.

        The phases and the waits for rewards within it are those of the step. The viewer draws its timeline, and shows
        the share of judging that was hidden.

        Raises:
            RewardLoopError: on entry, if another step has not ended.
        """
        return self._events.step(number)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record the ``with`` block as a phase of the current step, such as ``"generate"`` or ``"update"``.

        Raises:
            RewardLoopError: on entry, outside of a step.
            ConfigError: on entry, if the name is ``step``.
        """
        return self._events.phase(name)

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
        pending = PendingRewards(rows, sizes, next(self._numbers), self._settled, self._events.waiting)
        pending.has_sizes = group_size is not None or groups is not None
        if not pending.done():
            # Atomic, as `next` is: a BlockingRewardAgent accepts batches in its caller's threads.
            self._unsettled[pending.number] = pending
        return pending

    def _settled(self, pending: PendingRewards) -> None:
        self._unsettled.pop(pending.number, None)

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
                pending._tasks.add(task)
                self._batches[task] = pending
                return task
        return None

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the batch of a task that ended with an error."""
        pending = self._batches.pop(task)
        pending._tasks.discard(task)
        if (error := failure_of(task, self.manager)) is not None:
            # No effect if the batch has ended, and has cancelled this task itself.
            pending._fail(error)

    async def _score(self, pending: PendingRewards, sample: int) -> None:
        row = self._row(pending, sample)
        if self._needs_group:
            task = asyncio.current_task()
            assert task is not None
            release = functools.partial(self._tasks.release, task)
            CALLER.set(Caller(reports_lost=pending.has_sizes, release=release))
        result, reward = await scored(self.manager, row, getattr(row, "uid", None) or f"sample {sample}")
        self._events.reward_arrived(row, pending.submitted)
        # The batch may have ended, if user code has suppressed the cancellation: an ended batch never changes.
        if pending.error is not None:
            return
        group = pending._add_reward(sample, result, reward)
        if group is None:
            return
        pending._complete(group)

    def _row(self, pending: PendingRewards, sample: int) -> Any:
        """The sample as the manager receives it: with uid and group, if function, manager or records need them."""
        row = pending._samples[sample]
        if not self._names_groups:
            return row
        number = pending._group_of(sample)
        members = pending._members(number)
        # The caller has not given its size: then that of a group with a name of its own is not known.
        size = len(members) if pending.has_sizes or getattr(row, "group", None) is None else None
        return _with_group(row, f"{self._name}.{pending.number}.{number}", sample - members.start, size)


def _with_group(sample: Any, group: str, member: int, size: int | None) -> Any:
    """Return a sample, or a row of verl's ``DataProto``, with its uid, group and size of the group, where they lack."""
    if isinstance(sample, RewardSample):
        return replace(
            sample,
            uid=sample.uid or f"{group}_{member}",
            group=group if sample.group is None else sample.group,
            group_size=sample.group_size or size,
        )
    if not hasattr(sample, "non_tensor_batch"):
        return sample
    row = copy.copy(sample)
    row.non_tensor_batch = {"uid": [group], "session_id": [member], "group_size": [size], **sample.non_tensor_batch}
    return row


class StepEvents:
    """Records steps, their phases, waits for rewards, and when each reward was requested and arrived.

    Args:
        records: the manager's records; ``None`` to record nothing.
    """

    def __init__(self, records: Records | None) -> None:
        self._records = records
        self._step: int | None = None
        self._has_steps = False
        """Whether a step has begun. The other events are read only together with steps."""
        self._waited_s = 0.0
        self._pending: list[Interval] = []
        """When the rewards were pending that have arrived in the current step."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block as a training step; see `RewardAgent.step`."""
        if self._step is not None:
            raise RewardLoopError(f"step {number} cannot begin: step {self._step} has not ended")
        self._step, self._has_steps = number, True
        try:
            with self._recorded(STEP, number):
                yield
        finally:
            if self._pending and self._records is not None:
                self._records.write_overlap(number, self._waited_s, seconds_of(self._pending))
            self._step, self._waited_s, self._pending = None, 0.0, []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of the current step; see `RewardAgent.phase`."""
        if self._step is None:
            raise RewardLoopError(f"the phase {name!r} is outside of a step: open one with `with agent.step(number)`")
        if name == STEP:
            raise ConfigError(f"the name {STEP!r} is reserved for the whole step: give the phase another name")
        with self._recorded(name, self._step):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the block as a wait for rewards, if it is within a step."""
        if self._step is None:
            yield
            return
        start = time.time()
        try:
            with self._recorded("wait_reward", self._step, "rewards"):
                yield
        finally:
            self._waited_s += time.time() - start

    @contextmanager
    def _recorded(self, name: str, step: int, waits_for: WaitsFor | None = None) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            if self._records is not None:
                self._records.write_phase(name, step, start, time.time(), waits_for)

    def reward_arrived(self, sample: object, submitted: float) -> None:
        """Record a sample whose reward has arrived, after the first step has begun. Rows of verl's batch have no event.

        Args:
            sample: the sample as the manager received it.
            submitted: when it was submitted, in seconds since 1970. When it was generated is not known.
        """
        if self._records is None or not self._has_steps or not isinstance(sample, RewardSample):
            return
        times = {"end": submitted, "scoring": submitted, "scored": time.time()}
        if not sample.validate:
            self._pending.append((submitted, times["scored"]))
        self._records.write_rollout(
            str(sample.uid),
            sample.group,
            sample.step,
            validate=bool(sample.validate),
            start=submitted,
            times=times,
            error=None,
        )


def failure_of(task: asyncio.Task[None], manager: Any) -> RewardLoopError | None:
    """Return why a task that scores a sample failed; ``None`` if it did not.

    Errors of the user's function are not among them: they arrive as outcomes.
    """
    if task.cancelled():  # it may never have run a line of its own
        name = f"{type(manager).__name__}.run_single"
        return RewardLoopError(f"a sample of this batch was cancelled, from outside or by {name}")
    error = task.exception()
    if error is None or isinstance(error, RewardLoopError):
        return error
    wrapped = RewardLoopError(f"a sample could not be scored: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


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
