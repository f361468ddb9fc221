"""Samples that are scored together: `Batcher`, and `Groups`, which collects the samples of each prompt.

Invariants of `Groups`:

- A sample is a member of its group while it is scored. It then joins the others, or leaves the group without that: it
  has failed, has no score, or was cancelled. Rollouts that were lost before they were scored are reported.
- A group is closed once: when all its members have joined, left or are lost, and none is being scored. Its call gets
  those that have joined, in the order of the members.
- A sample that has joined holds no permit, thread or deadline, and no place in its caller's bound of samples in flight.
- Only groups whose caller reports no lost members have a timeout, such as those of verl's own reward loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.text import listing
from reward_loop.errors import ConfigError, IncompleteGroupError
from reward_loop.records import ActiveBatch, ActiveSample, current
from reward_loop.types import RewardSample

Call = Callable[[list[Any]], Awaitable[Sequence[Any]]]
"""Scores the items of a batch; returns one result for each, in order."""


@dataclass(slots=True)
class _Batch:
    """The items of a batch that wait for its call, and later for its results."""

    items: dict[asyncio.Future[Any], tuple[Any, ActiveSample | None]] = field(default_factory=dict)
    """By the future of its result; a sample scored without a manager is not active."""
    timer: asyncio.TimerHandle | None = None
    call: asyncio.Task[None] | None = None
    """The task that scores the batch, once the batch is closed. The batch owns it."""

    def add(self, item: Any) -> asyncio.Future[Any]:
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        active = current()
        if active is not None:
            active.batching = "the other samples of its group or batch"
        self.items[result] = (item, active)
        return result

    def close(self, call: Call) -> None:
        """Score the items, unless all have left."""
        if self.timer is not None:
            self.timer.cancel()
        if self.items:
            self.call = asyncio.get_running_loop().create_task(self._run(call))

    def cancelled(self) -> None:
        """Cancel the call if all its items are cancelled."""
        if self.call is not None and all(item.cancelled() for item in self.items):
            self.call.cancel()

    async def _run(self, call: Call) -> None:
        active = [active for _, active in self.items.values() if active is not None]
        try:
            # The task inherits the context of one member; `ActiveBatch` attributes its requests to all members.
            with ActiveBatch(active) if active else contextlib.nullcontext():
                results = await call([item for item, _ in self.items.values()])
            # `strict`: of another number of results, none can be assigned to its sample.
            for future, result in list(zip(self.items, results, strict=True)):
                if not future.done():
                    future.set_result(result)
        # The samples raise the error; raised here too, asyncio would log it as never retrieved.
        except Exception as error:
            for future in self.items:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in self.items:
                future.cancel()  # if the call was cancelled


class Batcher:
    """Collects items by key. A batch is scored when it is full, or when its first item has waited too long."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._open: dict[Hashable, _Batch] = {}

    async def score(self, item: Any, key: Hashable, size: int, wait: float) -> Any:
        """Add an item to the batch of its key, and return its result.

        Args:
            item: the item to score.
            key: identifies the batch.
            size: the number of items in a full batch.
            wait: seconds that the first item of a batch waits for the others.
        """
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = _Batch()
            batch.timer = asyncio.get_running_loop().call_later(wait, self._close, key)
        result = batch.add(item)
        if len(batch.items) >= size:
            self._close(key)
        try:
            return await result
        finally:
            # Cancelling a task also cancels the future that it awaits.
            if result.cancelled():
                if batch.call is None:
                    del batch.items[result]
                    if not batch.items:
                        self._close(key)
                batch.cancelled()

    def _close(self, key: Hashable) -> None:
        self._open.pop(key).close(self._call)


@dataclass(frozen=True, slots=True)
class Caller:
    """What the caller of ``run_single`` does for the groups of its samples; set as `CALLER` in a sample's task."""

    reports_lost: bool = False
    """Whether it submits each member of a group, or reports it as lost. Then no timeout is needed."""
    repeats: bool = False
    """Whether it may submit a sample twice, with the same uid."""
    lost: Collection[str] = ()
    """The uids of members that it has reported as lost, perhaps to a process that has ended."""
    group: Hashable = None
    """The key of the sample's group if its name may not be unique; ``None`` to use the name."""
    release: Callable[[], None] | None = None
    """Called when a sample waits for its group: it is not in flight any more."""


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  it is immutable


@dataclass(slots=True)
class _Member:
    """A sample that is being scored."""

    key: Hashable
    group: _OpenGroup
    name: Hashable
    place: tuple[int, int]
    """The order of the members: by their number in the group if their names have one, otherwise by arrival."""
    has_joined: bool = False


@dataclass(slots=True)
class _OpenGroup(_Batch):
    size: int = 0
    scoring: int = 0
    """The number of members that are being scored."""
    joined: dict[Hashable, tuple[tuple[int, int], asyncio.Future[Any]]] = field(default_factory=dict)
    """Name -> place, and future of the result."""
    gone: set[Hashable] = field(default_factory=set)
    """The names of members that have left, or are lost."""


_member: ContextVar[_Member] = ContextVar("member")


class Groups:
    """Collects the samples of each group, and calls a function with those that have joined it.

    Args:
        call: returns one result for each of the joined items.
        size: the number of samples in a group, for samples without a ``group_size``.
        timeout: seconds without a sample of a group that is being scored, after which the waiting ones fail.
        who: what needs the groups, for messages.
    """

    def __init__(self, call: Call, size: int | None, timeout: float, who: str) -> None:
        self._call = call
        self._size = size
        self._timeout = timeout
        self._who = who
        self._open: dict[Hashable, _OpenGroup] = {}
        self._arrivals = itertools.count()

    @contextlib.contextmanager
    def member(self, sample: RewardSample) -> Iterator[Callable[[], bool]]:
        """Make a sample a member of its group within the block. A sample without a group is a group of its own.

        The context is a function that returns whether the sample has joined its group.

        Raises:
            ConfigError: the size of the group is not known.
        """
        caller, uid = CALLER.get(), sample.uid
        key = sample.group if caller.group is None else caller.group
        key = object() if key is None else key
        size = 1 if sample.group is None else sample.group_size or self._size
        if size is None:
            raise ConfigError(
                f"{self._who} needs the size of each group: set reward_loop.group.size, or RewardSample.group_size"
            )
        # verl's rollouts, and the samples that an agent names, have the uid `{group}_{number}`.
        start, _, number = (uid or "").rpartition("_")
        place = int(number) if start == sample.group and number.isdecimal() else 0
        group = self._group(key, size, None if caller.reports_lost else self._timeout)
        group.scoring += 1
        group.gone.update(caller.lost)
        name = uid if caller.repeats else object()
        member = _Member(key, group, name, (place, next(self._arrivals)))
        token = _member.set(member)
        try:
            yield lambda: member.has_joined
        finally:
            _member.reset(token)
            if not member.has_joined:
                group.scoring -= 1
                group.gone.add(member.name)
                self._close_if_complete(key, group)

    async def join(self, item: Any) -> Any:
        """Wait for the group of the current member, and return the result of its item.

        Raises:
            ConfigError: the member has joined before.
            IncompleteGroupError: members of the group are missing, and nobody has reported that they are lost.
        """
        member = _member.get()
        group = member.group
        if member.has_joined:
            raise ConfigError(f"{self._who}: call the base class's score_one once for each sample")
        member.has_joined = True
        group.scoring -= 1
        result = group.add(item)
        own = member.place, result
        # The same sample, submitted twice: its first caller does not wait any more, also if it comes last.
        first, last = sorted((group.joined.get(member.name, own), own), key=lambda joined: joined[0])
        group.joined[member.name] = last
        if first is not last:
            first[-1].cancel()
        if (release := CALLER.get().release) is not None:
            release()
        self._close_if_complete(member.key, group)
        try:
            return await result
        finally:
            if result.cancelled():
                if group.call is None and group.joined.get(member.name, (result,))[-1] is result:
                    del group.joined[member.name]
                    group.gone.add(member.name)
                    self._close_if_complete(member.key, group)
                group.cancelled()

    def lose(self, key: str, size: int, uids: Collection[str]) -> None:
        """Report samples of a group that were lost before they were scored. To report one again has no effect."""
        group = self._group(key, size, None)
        group.gone.update(uids)
        self._close_if_complete(key, group)

    def _group(self, key: Hashable, size: int, timeout: float | None) -> _OpenGroup:
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _OpenGroup(size=size)
            if timeout is not None:
                self._wait(key, group)
        return group

    def _close_if_complete(self, key: Hashable, group: _OpenGroup) -> None:
        if group.call is None and not group.scoring and len(group.joined.keys() | group.gone) >= group.size:
            self._open.pop(key, None)
            in_order = sorted(group.joined.values(), key=lambda joined: joined[0])
            group.items = {result: group.items[result] for _, result in in_order}
            group.close(self._call)

    def _wait(self, key: Hashable, group: _OpenGroup) -> None:
        group.timer = asyncio.get_running_loop().call_later(self._timeout, self._expire, key, group)

    def _expire(self, key: Hashable, group: _OpenGroup) -> None:
        if group.scoring:
            self._wait(key, group)
            return
        names = listing(str(active.sample.uid) for _, active in group.items.values() if active is not None)
        problem = (
            f"group {key}: only {len(group.items)} of {group.size} samples arrived within {self._timeout:g} s "
            f"(reward_loop.group.timeout): {names}"
        )
        self._open.pop(key, None)
        for result in group.items:
            if not result.done():
                result.set_exception(IncompleteGroupError(problem))
