"""A call of the user's function, and how it ended: as data, wherever it ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_loop._util.traceback_lines import user_lines
from reward_loop.errors import ScoringError

__all__ = ["Call", "Ended", "describe_exception"]

_MESSAGE_CHARACTERS = 500


@dataclass(slots=True)
class Ended:
    """How a call ended."""

    value: Any
    exception: BaseException | None
    seconds: float
    """How long the function ran."""
    described: str = ""
    """What `describe_exception` said of the exception where it was raised, if that was in another process."""
    attempts: int = 1
    """How often the function was called."""
    waited: float = 0.0
    """How many seconds it waited for limits, and between attempts."""
    queued: float = 0.0
    """How many seconds it waited for a thread or a process."""
    cut_short: ScoringError | None = None
    """Why it did not end by itself, or was not called at all."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments; calling it calls the function in this thread.

    Nothing is raised: not even SystemExit may end the thread, or the process.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Ended:
        started = time.perf_counter()
        try:
            value, exception = self.function(*self.args, **self.kwargs), None
        except BaseException as error:
            value, exception = None, error
        return Ended(value, exception, time.perf_counter() - started)


def describe_exception(error: BaseException) -> str:
    """Return the exception's type, its message, and the lines of code that show where the user's function failed."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    if len(message) > _MESSAGE_CHARACTERS:
        message = message[:_MESSAGE_CHARACTERS] + "..."
    tail = user_lines(error)
    return f"{type(error).__name__}: {message}" + (f"\n{tail}" if tail else "")
