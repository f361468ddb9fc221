"""Which functions run in processes of their own, and how."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from reward_loop.errors import FunctionLoadError
from reward_loop.processes import worker
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.scoring.load import file_modules
from reward_loop.scoring.signature import Target

__all__ = ["Isolation", "SplitSemaphore", "in_processes", "is_isolated", "isolated"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_reward_loop_isolation"


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a function runs in processes of its own.

    Args:
        max_processes: how many calls run at a time; by default as many as there are cores.
        max_memory_mb: megabytes (2^20 bytes) that a process may use, with everything it started; by default no bound.
    """

    max_processes: int | None = None
    max_memory_mb: int | None = None


@overload
def isolated(function: F, /) -> F: ...


@overload
def isolated(*, max_processes: int | None = None, max_memory_mb: int | None = None) -> Callable[[F], F]: ...


def isolated(
    function: F | None = None, /, *, max_processes: int | None = None, max_memory_mb: int | None = None
) -> F | Callable[[F], F]:
    """Mark a sync reward function, or a class, to run in processes that can be killed, whatever the configuration.

    What it does not say is taken from the configuration. Written as ``@isolated`` or ``@isolated(max_memory_mb=512)``.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, Isolation(max_processes, max_memory_mb))
        return function

    return mark if function is None else mark(function)


class SplitSemaphore(threading.Semaphore):
    """A semaphore for threads. Sent to a function's processes, it is split among them, at least one for each."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        return _split, (self._count,)


def _split(count: int) -> SplitSemaphore:
    return SplitSemaphore(max(1, count // worker.processes))


def is_isolated(target: Target) -> bool:
    """Whether the function is marked."""
    return _mark_of(target.call) is not None


def in_processes(target: Target, options: Isolation) -> WorkerProcesses:
    """Return the processes that the function runs in. Its mark, if there is one, counts more than ``options``.

    Raises:
        FunctionLoadError: it is async, or cannot be sent to a process.
    """
    if target.is_async:
        raise FunctionLoadError(
            f"{target.name} is async, and only sync functions run in processes: await a judge on the event loop, "
            "or write a plain `def`"
        )
    mark = _mark_of(target.call) or Isolation()
    return WorkerProcesses(
        target.call,
        name=target.name,
        files=file_modules(),
        max_processes=mark.max_processes or options.max_processes,
        max_memory_mb=mark.max_memory_mb or options.max_memory_mb,
    )


def carry_mark(function: Any, to: Any) -> None:
    """Put the mark of a function, if it has one, on what calls it."""
    if (mark := _mark_of(function)) is not None:
        setattr(to, _MARK, mark)


def _mark_of(function: Any) -> Isolation | None:
    """The mark on the function, or on the class of which it is a method."""
    while True:
        mark = getattr(function, _MARK, None) or getattr(getattr(function, "__self__", None), _MARK, None)
        if mark is not None or not isinstance(function, functools.partial):
            return mark
        function = function.func
