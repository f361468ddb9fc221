"""The active samples of this process: those whose scoring has started and not ended."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol, Self

from reward_loop.types import RewardSample

MAX_COPIES = 256
"""Maximum number of copies of exchanges (samples x exchanges) of one batch call. Up to this number, each sample of the
batch gets all exchanges; above it, only the first sample gets them, since the copies would fill the disk."""


OUTAGE = "the end of the outage of"
"""The beginning of the text with which `ActiveSample.asking` names a wait for a judge that cannot be reached."""


class Queued(Protocol):
    """A call that an executor has accepted."""

    @property
    def started(self) -> float | None:
        """When the call started; ``None`` until then."""


class ActiveSample:
    """A sample that is being scored, and the requests that its reward function makes.

    The sample is active within ``with``. There, and in threads that copy this context, `current` returns it.

    Args:
        sample: the sample.
        function: name and file of the function.
        watchdog_s: seconds after which the watchdog logs the sample; ``None`` to never log it.
        is_recorded: whether to collect the calls of the function and the exchanges with model servers for a record.
    """

    # Class attributes as defaults, so that a sample without requests takes little memory.
    asking: Sequence[str] = ()
    """What the sample waits for: requests to servers, limits, or the pause before a retry."""
    queued: Sequence[tuple[str, Queued]] = ()
    """The calls that an executor has accepted, each with what it waits for until it starts."""
    batching: str = ""
    """What the sample waits for until its batch call starts; empty if it is not part of one."""
    exchanges: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """The requests to model servers with their replies, by the ID of the exchange."""
    calls: Sequence[dict[str, Any]] = ()
    """The calls of the function, in the order of their ends, as `called` describes them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """The cost that the function reported, in its own unit."""
    batch: ActiveBatch | None = None
    """The batch call that contains this sample; ``None`` before it starts, and for functions of single samples."""
    batch_s: float = 0.0
    """Seconds from the start of the sample to the start of its batch call: the wait for the other samples."""
    _outer: ActiveSample | None = None
    """What `current` returned before."""

    def __init__(
        self, sample: RewardSample, function: str, watchdog_s: float | None = None, is_recorded: bool = True
    ) -> None:
        self.sample = sample
        self.function = function
        self.watchdog_s = watchdog_s
        self.is_recorded = is_recorded
        self.started = time.perf_counter()

    def __enter__(self) -> Self:
        _active[self] = None
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.pop(self, None)  # a batch is not among them
        self.queued = ()  # breaks the reference cycle of a sample with its calls
        # Not `reset`: its token would be one more object for the garbage collector to visit, for each sample in flight.
        if _current.get() is self:  # if not, the garbage collector closes a coroutine in another context
            _current.set(self._outer)
        self._outer = None  # breaks the reference cycle of a batch with its members

    @property
    def seconds(self) -> float:
        """Time for which the sample has been active, in seconds."""
        return time.perf_counter() - self.started

    def ask(self, request: str) -> None:
        """Add an open request. Thread-safe, as `answered` is: a function may make requests in several threads."""
        # In one step, since two threads may make the first request at the same time.
        asking: list[str] = self.__dict__.setdefault("asking", [])
        asking.append(request)

    def answered(self, request: str) -> None:
        """Remove a request that has ended, with or without a response."""
        asking: list[str] = self.__dict__["asking"]
        asking.remove(request)

    def exchange(self, fields: Mapping[str, Any]) -> None:
        """Add an exchange with a model server, or further fields of the exchange with the same ``id``.

        The tokens that the fields report are added to those of the sample.
        """
        exchanges: dict[str, dict[str, Any]] = self.__dict__.setdefault("exchanges", {})
        exchanges.setdefault(fields["id"], {}).update(fields)
        self.prompt_tokens += fields.get("prompt_tokens", 0)
        self.completion_tokens += fields.get("completion_tokens", 0)

    def called(self, function: str, seconds: float, queued: float, waited: float, error: BaseException | None) -> None:
        """Add a call of the function that has just ended.

        Args:
            function: the function's name and file.
            seconds: for which the function ran (``work_s``). It started ``start_s`` after the sample.
            queued: the seconds of waiting for a free thread or process (``queue_s``).
            waited: the seconds of waiting for limits (``wait_s``).
            error: what the function raised, or why it returned nothing, such as a timeout; only the type is recorded.
        """
        call = {
            "function": function,
            "start_s": max(0.0, time.perf_counter() - self.started - seconds - waited),
            "queue_s": queued,
            "wait_s": waited,
            "work_s": seconds,
            "error": None if error is None else type(error).__name__,
        }
        self.calls = (*self.calls, call)

    def queue(self, what: str, call: Queued) -> None:
        """Record that a call waits for something, such as a free thread, until its ``started`` is set."""
        self.queued = [*self.queued, (what, call)]

    def waits(self) -> list[str]:
        """Return what the sample waits for."""
        queued = [what for what, call in self.queued if call.started is None]
        if self.batch is not None:
            return [*self.asking, *queued, *self.batch.waits()]
        return [*self.asking, *queued, self.batching] if self.batching else [*self.asking, *queued]


class ActiveBatch(ActiveSample):
    """One batch call: a call of a function of lists for several samples. Within ``with``, `current` returns the batch.

    Requests of a function of lists cannot be assigned to a single sample. At the end of the call, each sample gets an
    equal share of tokens and cost, and all exchanges. Above `MAX_COPIES`, only the first sample gets the exchanges.
    """

    def __init__(self, members: Sequence[ActiveSample]) -> None:
        names = ", ".join(str(member.sample.uid) for member in members)
        is_recorded = any(member.is_recorded for member in members)
        groups = {member.sample.group for member in members}
        group = groups.pop() if len(groups) == 1 else None
        super().__init__(RewardSample("", uid=names, group=group), members[0].function, is_recorded=is_recorded)
        self.members = members
        self.id = secrets.token_hex(6)

    def __enter__(self) -> Self:
        # A batch is not in `_active`: its members are, and the waits of each include those of the batch.
        for member in self.members:
            member.batch = self
            member.batch_s = self.started - member.started
        self._outer = _current.get()
        _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        count = len(self.members)
        is_small = count * len(self.exchanges) <= MAX_COPIES
        for i, member in enumerate(self.members):
            if self.exchanges and (is_small or i == 0):
                member.exchanges = {**member.exchanges, **self.exchanges}
            calls = ({**call, "start_s": call["start_s"] + member.batch_s} for call in self.calls)
            member.calls = (*member.calls, *calls)
            member.prompt_tokens += _share(self.prompt_tokens, i, count)
            member.completion_tokens += _share(self.completion_tokens, i, count)
            member.cost += self.cost / count
        self.members = ()  # breaks the reference cycle with the members


def _share(total: int, index: int, count: int) -> int:
    """Return the share of member ``index`` of ``count`` members; the shares add up to ``total``."""
    return total * (index + 1) // count - total * index // count


_active: dict[ActiveSample, None] = {}  # in the order of their start
_current: ContextVar[ActiveSample | None] = ContextVar("active_sample", default=None)


current = _current.get
"""Return the active sample or batch of the calling code; ``None`` outside of a reward function."""


@contextlib.contextmanager
def waiting_for(sample: ActiveSample | None, what: str) -> Iterator[None]:
    """Record, within ``with``, that a sample waits for something, such as ``limit 'judge'``.

    The sample may differ from `current`: the permit for a function in a worker process is requested by another task.
    ``None`` does nothing.
    """
    if sample is not None:
        sample.ask(what)
    try:
        yield
    finally:
        if sample is not None:
            sample.answered(what)


def active_samples() -> list[ActiveSample]:
    """Return all active samples of this process, the oldest first."""
    # A copy in one step: the watchdog's thread calls this while the event loop changes the dict.
    return list(_active)
