"""The samples that this process is scoring: each is listed from its start to its end."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from reward_loop.types import RewardSample

__all__ = ["ActiveBatch", "ActiveSample", "current", "in_work", "waiting_for"]


MAX_COPIES = 256
"""Samples times transcripts of a call for several samples, up to which each sample gets all transcripts of the call:
records with that many copies of larger batches would fill the disk."""


class ActiveSample:
    """A sample that is being scored, and the requests that its reward function makes.

    It is active within ``with``. There, and in the threads that are started there, it is the `current` one.

    Args:
        sample: the sample.
        function: name and file of the function.
        watchdog_s: seconds after which the watchdog logs it; ``None`` for never.
    """

    # Defaults of the class, so that a sample without requests takes little memory.
    asking: Sequence[str] = ()
    """What the sample waits for: requests to servers, limits, the pause before another attempt."""
    transcripts: Sequence[Mapping[str, Any]] = ()
    """The questions to judges, with their replies."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    batch: ActiveBatch | None = None
    """The call that this sample shares with others."""
    batch_s: float = 0.0
    """Seconds from the sample's start to the start of that call: the wait for the other samples."""

    def __init__(self, sample: RewardSample, function: str, watchdog_s: float | None = None) -> None:
        self.sample = sample
        self.function = function
        self.watchdog_s = watchdog_s
        self.started = time.perf_counter()

    def __enter__(self) -> Self:
        _in_work[self] = None
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del _in_work[self]
        with contextlib.suppress(ValueError):  # the garbage collector ends coroutines outside of their contexts
            _current.reset(self._token)

    @property
    def seconds(self) -> float:
        """How long the sample has been active."""
        return time.perf_counter() - self.started

    def ask(self, request: str) -> None:
        """Add a request that is sent."""
        self.asking = [*self.asking, request]

    def answered(self, request: str) -> None:
        """Remove a request that has ended, with or without an answer."""
        left = list(self.asking)
        left.remove(request)
        self.asking = left

    def describe(self) -> dict[str, Any]:
        """Return the sample's names, its function, its time and its open requests, for people."""
        return {
            "uid": self.sample.uid,
            "data_source": self.sample.data_source,
            "function": self.function,
            "seconds": round(self.seconds, 3),
            "asking": [*self.asking, *(self.batch.asking if self.batch is not None else ())],
        }


class ActiveBatch(ActiveSample):
    """One call of a function for several samples. Within ``with`` it is the `current` one, in place of its samples.

    Requests in a function of lists cannot be assigned to one of its samples. So at the end each sample gets an even
    share of the tokens, and all transcripts of the call, or those of a large call only the first sample.
    """

    def __init__(self, members: Sequence[ActiveSample]) -> None:
        names = ", ".join(str(member.sample.uid) for member in members)
        super().__init__(RewardSample("", uid=names), members[0].function)
        self.members = members
        self.id = secrets.token_hex(6)

    def __enter__(self) -> Self:
        for member in self.members:
            member.batch = self
            member.batch_s = self.started - member.started
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ValueError):  # as in `ActiveSample`
            _current.reset(self._token)
        count = len(self.members)
        is_small = count * len(self.transcripts) <= MAX_COPIES
        for i, member in enumerate(self.members):
            if is_small or i == 0:
                member.transcripts = [*member.transcripts, *self.transcripts]
            member.prompt_tokens += _share(self.prompt_tokens, i, count)
            member.completion_tokens += _share(self.completion_tokens, i, count)
        self.members = ()  # its members refer to it: no cycles for the garbage collector


def _share(total: int, index: int, count: int) -> int:
    """Return the share of one of ``count`` members; the shares add up to ``total``."""
    return total * (index + 1) // count - total * index // count


_in_work: dict[ActiveSample, None] = {}  # in the order in which they started
_current: ContextVar[ActiveSample | None] = ContextVar("reward_call", default=None)


def current() -> ActiveSample | None:
    """Return the sample that this code is scoring, or the batch of them; ``None`` outside of a reward function."""
    return _current.get()


@contextlib.contextmanager
def waiting_for(sample: ActiveSample | None, what: str) -> Iterator[None]:
    """Record, within ``with``, that a sample waits for something other than a request; `describe` shows it.

    Args:
        sample: the sample, ``None`` outside of any. It is not always the `current` one: a limit for a function in a
            process is granted by another task.
        what: what it waits for, such as ``limit 'judge'``.
    """
    if sample is not None:
        sample.ask(what)
    try:
        yield
    finally:
        if sample is not None:
            sample.answered(what)


def in_work() -> list[ActiveSample]:
    """Return all active samples of this process, the oldest first."""
    return list(_in_work)
