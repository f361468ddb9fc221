"""The calls of reward functions that are in work: each is known from its start to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from reward_loop.types import RewardSample

__all__ = ["Call", "current", "in_work", "waiting_for"]


class Call:
    """One call of a reward function, and what those that work for it have to tell.

    It counts as in work within ``with``. There, and in the threads that are started there, it is the `current` one.
    """

    # Defaults of the class, so that a call that has nothing to tell costs little.
    asking: Sequence[str] = ()
    """What the sample waits for: requests to servers, limits, the pause before another attempt."""
    transcripts: Sequence[Mapping[str, Any]] = ()
    """What judges were asked, and what they replied."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __init__(self, sample: RewardSample, function: str) -> None:
        self.sample = sample
        self.function = function
        """Name and file of the function."""
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
        """How long it has been in work."""
        return time.perf_counter() - self.started

    def ask(self, request: str) -> None:
        """A request is sent."""
        self.asking = [*self.asking, request]

    def answered(self, request: str) -> None:
        """It has ended, one way or the other."""
        left = list(self.asking)
        left.remove(request)
        self.asking = left

    def describe(self) -> dict[str, Any]:
        """For people: who, what, and since when."""
        return {
            "uid": self.sample.uid,
            "data_source": self.sample.data_source,
            "function": self.function,
            "seconds": round(self.seconds, 3),
            "asking": list(self.asking),
        }


_in_work: dict[Call, None] = {}  # in the order in which they started
_current: ContextVar[Call | None] = ContextVar("reward_call", default=None)


def current() -> Call | None:
    """The call that this code runs in, if any."""
    return _current.get()


@contextlib.contextmanager
def waiting_for(call: Call | None, what: str) -> Iterator[None]:
    """Record, within ``with``, that a sample waits for something other than a request; `describe` shows it.

    Args:
        call: the sample, ``None`` outside of any. It is not always the `current` one: a limit for a function in a
            process is granted by a task of its own.
        what: what it waits for, such as ``limit 'judge'``.
    """
    if call is not None:
        call.ask(what)
    try:
        yield
    finally:
        if call is not None:
            call.answered(what)


def in_work() -> list[Call]:
    """All calls of this process that are in work, the oldest first."""
    return list(_in_work)
