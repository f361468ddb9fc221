"""The outcome of a call of the user's function: the same data for threads, processes and the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reward_loop._util.text import cut, last_user_frame, user_lines
from reward_loop._util.transient import is_refusal, is_transient, out_of_credit, retry_after, status_of, unreachable
from reward_loop.errors import ScoringError

_MESSAGE_CHARACTERS = 500


# eq=False: an exception is equal only to itself. It is pickled by its `args`, so pass all values by position.
@dataclass(eq=False)
class RemoteError(Exception):
    """Represents an exception raised in a worker process, with the data that retries and limits need.

    If the original exception cannot be unpickled (for instance because of keyword-only arguments), this is the call's
    exception. Otherwise this is the ``__cause__`` of the original, whose traceback and causes pickle drops.
    """

    description: str
    """What `describe_exception` returned in the process."""
    cause: str
    """What `cause_of` returned in the process."""
    transient: bool
    """Whether a retry may succeed."""
    status: int | None
    """The HTTP status of the service's response; 429 if any exception in the chain is a refusal."""
    retry_after: float | None
    """The seconds that the service asked to wait."""
    unreachable: str | None
    """What `unreachable` returned in the process."""
    out_of_credit: bool
    """What `out_of_credit` returned in the process: the body of the answer stays there."""

    def __str__(self) -> str:
        return self.description

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Return the `RemoteError` that represents an exception."""
        status = 429 if is_refusal(error) else status_of(error)
        return cls(
            describe_exception(error),
            cause_of(error),
            is_transient(error),
            status,
            retry_after(error),
            unreachable(error),
            out_of_credit(error),
        )


@dataclass(slots=True)
class CallOutcome:
    """The outcome of a call of the user's function, as data."""

    value: Any
    """The return value."""
    exception: BaseException | None
    """The exception that the function raised."""
    work_s: float
    """Seconds that the function ran."""
    error: ScoringError | None = None
    """Why there is neither a value nor an exception: the call was stopped, crashed, or did not start."""
    attempts: int = 1
    """The number of calls of the function."""
    wait_s: float = 0.0
    """Seconds of waiting for limits and between attempts."""
    outage_s: float = 0.0
    """Seconds of waiting for a judge that could not be reached; part of `wait_s`."""
    note: str = ""
    """What the message of a failed sample says below the exception."""
    queue_s: float = 0.0
    """Seconds of waiting for a free thread or process."""

    @classmethod
    def without_call(cls, error: ScoringError) -> CallOutcome:
        """Return the outcome of a call that did not start."""
        return cls(None, None, 0.0, error, attempts=0)


def outcome_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> CallOutcome:
    """Call a function in the current thread, and return its outcome.

    The outcome contains any exception. Even SystemExit is caught, so that it does not end the thread or process.
    """
    started = time.perf_counter()
    try:
        value, exception = function(**arguments), None
    except BaseException as error:
        value, exception = None, error
    return CallOutcome(value, exception, time.perf_counter() - started)


def describe_exception(error: BaseException) -> str:
    """Return an exception's type, message, and last traceback lines in user code.

    Of a group of exceptions, as of `asyncio.TaskGroup`, the first one is described, too, with its traceback lines. For
    an exception raised in a worker process, they are those of the original exception.
    """
    remote = error if isinstance(error, RemoteError) else error.__cause__
    if isinstance(remote, RemoteError):
        return remote.description
    text, tail = _summary(error), user_lines(error)
    if isinstance(error, BaseExceptionGroup):
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        text, tail = f"{text}; the first: {_summary(error)}", user_lines(error) or tail
    return f"{text}\n{tail}" if tail else text


def cause_of(error: BaseException) -> str:
    """Return an exception's type, and the function and line of the user's code that raised it.

    Failures are grouped by it: the message may contain data of the sample. Of a group of exceptions, the first one
    counts. For an exception raised in a worker process, it is that of the original exception.
    """
    remote = error if isinstance(error, RemoteError) else error.__cause__
    if isinstance(remote, RemoteError):
        return remote.cause
    frame = last_user_frame(error)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        frame = last_user_frame(error) or frame
    where = "" if frame is None else f" in {frame.name} ({frame.filename}:{frame.lineno})"
    return type(error).__name__ + where


def _summary(error: BaseException) -> str:
    """Return an exception's type and message; a long message is cut."""
    try:
        # `__str__` is code of the user or of a library, and may raise.
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    return f"{type(error).__name__}: {cut(message, _MESSAGE_CHARACTERS)}"
