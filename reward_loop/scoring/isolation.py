"""Run sync reward functions in worker processes: the `isolated` decorator and its options."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, TypeVar, overload

from reward_loop.errors import FunctionLoadError
from reward_loop.processes.child import callable_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.scoring.load import file_modules
from reward_loop.scoring.signature import Target

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_reward_loop_isolation"


@dataclass(frozen=True, slots=True)
class Isolation:
    """Options for running a function in worker processes.

    Args:
        max_processes: the maximum number of concurrent calls; by default the number of cores.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its child processes; by default none.
        calls_per_process: the number of calls of a process; ``None``: each process loads the function itself, and
            serves calls until it is killed.
    """

    max_processes: int | None = None
    max_memory_mb: int | None = None
    calls_per_process: int | EllipsisType | None = ...
    """``...``: as in the other options."""


@overload
def isolated(function: F, /) -> F: ...


@overload
def isolated(
    *,
    max_processes: int | None = None,
    max_memory_mb: int | None = None,
    calls_per_process: int | EllipsisType | None = ...,
) -> Callable[[F], F]: ...


def isolated(
    function: F | None = None,
    /,
    *,
    max_processes: int | None = None,
    max_memory_mb: int | None = None,
    calls_per_process: int | EllipsisType | None = ...,
) -> F | Callable[[F], F]:
    """Mark a sync reward function or class to run in worker processes, which are killed at the deadline.

    The mark overrides ``isolation`` in the configuration. Options that are not given come from the configuration.

    Args:
        function: the function or class, if used as ``@isolated`` without arguments.
        max_processes: the maximum number of concurrent calls.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its child processes.
        calls_per_process: the number of calls of a process. With 1, no call sees what another one has changed.
            ``None``: each process loads the function itself, and serves calls until it is killed.

    Example::

        @isolated(max_memory_mb=512)
        def compute_score(solution_str, ground_truth): ...
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, Isolation(max_processes, max_memory_mb, calls_per_process))
        return function

    return mark if function is None else mark(function)


class SplitSemaphore(threading.Semaphore):
    """A `threading.Semaphore` that can be pickled: each worker process of the function gets its share, at least 1."""

    def __init__(self, count: int, processes: int) -> None:
        super().__init__(count)
        self._share = max(1, count // processes)

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitSemaphore, (self._share, 1)


def is_isolated(target: Target) -> bool:
    """Whether the function is marked with `isolated`."""
    return _mark_of(target.origin) is not None


def in_processes(target: Target, options: Isolation) -> WorkerProcesses:
    """Return a process pool for the function. Values set by `isolated` take precedence over ``options``.

    Raises:
        FunctionLoadError: the function is async, or cannot be pickled.
    """
    if target.is_async:
        raise FunctionLoadError(
            f"{target.name} is async, and only sync functions run in processes: await a judge on the event loop, "
            "or write a plain `def`"
        )
    if getattr(target.origin, "has_async_parts", False):
        raise FunctionLoadError(
            f"{target.name} has async parts, and only sync functions run in processes: leave out `isolated` and "
            "isolation=process, or write all parts as plain `def`"
        )
    # The author of the function knows what it needs, so the mark wins over the options of the run.
    mark = _mark_of(target.origin) or Isolation()
    calls = options.calls_per_process if mark.calls_per_process is ... else mark.calls_per_process
    assert not isinstance(calls, EllipsisType)  # `options` are those of the run
    return WorkerProcesses(
        target.origin,
        target.constructor,
        name=target.name,
        files=file_modules(),
        max_processes=mark.max_processes or options.max_processes,
        max_memory_mb=mark.max_memory_mb or options.max_memory_mb,
        calls_per_process=calls,
    )


def _mark_of(function: Any) -> Isolation | None:
    """Return the mark of a function, of the object whose method it is, or of a class or its method ``compute_score``.

    Also through `functools.partial`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    marks = (
        getattr(one, _MARK, None) for one in (function, getattr(function, "__self__", None), callable_of(function))
    )
    return next(filter(None, marks), None)
