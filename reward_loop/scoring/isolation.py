"""Where sync reward functions run: the mark on a function, and the executor that follows from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from reward_loop.errors import FunctionLoadError
from reward_loop.scoring.processes import WorkerProcesses
from reward_loop.scoring.signature import Target
from reward_loop.scoring.threads import DaemonThreads

__all__ = ["Isolation", "choose_executor", "isolated"]

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


def choose_executor(
    target: Target, isolation: Literal["thread", "process"], threads: DaemonThreads, options: Isolation
) -> DaemonThreads | WorkerProcesses:
    """Return ``threads``, or processes if the configuration or the function's mark says so.

    Raises:
        FunctionLoadError: the function is marked and async, or it cannot be sent to a process.
    """
    mark = _mark_of(target.call)
    if target.is_async:
        if mark is not None:
            raise FunctionLoadError(f"{target.name} is async, and only sync functions can be isolated")
        return threads
    if mark is None and isolation == "thread":
        return threads
    mark = mark or Isolation()
    return WorkerProcesses(
        target.call,
        name=target.name,
        max_processes=mark.max_processes or options.max_processes,
        max_memory_mb=mark.max_memory_mb or options.max_memory_mb,
    )


def _mark_of(function: Any) -> Isolation | None:
    """The mark on the function, or on the class of which it is a method."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, _MARK, None) or getattr(getattr(function, "__self__", None), _MARK, None)
