"""Run sync reward functions in worker processes: the `isolated` decorator and its options."""

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

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_reward_loop_isolation"


@dataclass(frozen=True, slots=True)
class Isolation:
    """Options for running a function in worker processes.

    Args:
        max_processes: the maximum number of concurrent calls; by default the number of cores.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its child processes; by default none.
        max_calls_per_process: the number of calls after which a process is replaced; by default never.
    """

    max_processes: int | None = None
    max_memory_mb: int | None = None
    max_calls_per_process: int | None = None


@overload
def isolated(function: F, /) -> F: ...


@overload
def isolated(
    *, max_processes: int | None = None, max_memory_mb: int | None = None, max_calls_per_process: int | None = None
) -> Callable[[F], F]: ...


def isolated(
    function: F | None = None,
    /,
    *,
    max_processes: int | None = None,
    max_memory_mb: int | None = None,
    max_calls_per_process: int | None = None,
) -> F | Callable[[F], F]:
    """Mark a sync reward function or class to run in worker processes, which are killed at the deadline.

    The mark overrides ``isolation`` in the configuration. Options that are not given come from the configuration.

    Args:
        function: the function or class, if used as ``@isolated`` without arguments.
        max_processes: the maximum number of concurrent calls.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its child processes.
        max_calls_per_process: the number of calls after which a process is replaced.

    Example::

        @isolated(max_memory_mb=512)
        def compute_score(solution_str, ground_truth): ...
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, Isolation(max_processes, max_memory_mb, max_calls_per_process))
        return function

    return mark if function is None else mark(function)


class SplitSemaphore(threading.Semaphore):
    """A `threading.Semaphore` that can be pickled: its count is divided among the function's worker processes.

    Each process gets at least 1.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._count = count

    def __reduce__(self) -> tuple[Any, ...]:
        return _split, (self._count,)


def _split(count: int) -> SplitSemaphore:
    return SplitSemaphore(max(1, count // worker.processes))


def is_isolated(target: Target) -> bool:
    """Whether the function is marked with `isolated`."""
    return _mark_of(target.call) is not None


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
    # The author of the function knows what it needs, so the mark wins over the options of the run.
    mark = _mark_of(target.call) or Isolation()
    return WorkerProcesses(
        target.call,
        name=target.name,
        files=file_modules(),
        max_processes=mark.max_processes or options.max_processes,
        max_memory_mb=mark.max_memory_mb or options.max_memory_mb,
        max_calls=mark.max_calls_per_process or options.max_calls_per_process,
    )


def _mark_of(function: Any) -> Isolation | None:
    """Return the mark of the function, or of the object whose method it is, also through `functools.partial`."""
    while True:
        mark = getattr(function, _MARK, None) or getattr(getattr(function, "__self__", None), _MARK, None)
        if mark is not None or not isinstance(function, functools.partial):
            return mark
        function = function.func
