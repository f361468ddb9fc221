"""How the user's function is called: `ScoringOptions`, and the decorator `isolated` for worker processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, overload

from pydantic import Field

from reward_loop.errors import FunctionLoadError
from reward_loop.limits.options import JobOptions
from reward_loop.processes.child import callable_of
from reward_loop.processes.pool import WorkerProcesses
from reward_loop.records.options import RecordOptions
from reward_loop.scoring.load import file_modules
from reward_loop.scoring.signature import Target

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_reward_loop_isolation"


class ScoringOptions(JobOptions, RecordOptions):
    """How the user's function is called."""

    timeout: float | None = Field(default=300.0, gt=0)
    """Seconds from the start of the function to its deadline; ``None`` for no deadline."""

    max_threads: int = Field(default=64, ge=1)
    """The largest number of calls of a sync function that run at the same time."""

    isolation: Literal["thread", "process"] = "thread"
    """Where sync functions run: in threads, which cannot be killed, or in processes, which can. A function marked with
    ``isolated`` always runs in processes."""

    max_processes: int | None = Field(default=None, ge=1)
    """The largest number of calls of a sync function that run in processes at the same time. By default the number of
    cores. In a verl run, the reward workers of a node share its cores."""

    max_memory_mb: int | None = Field(default=None, ge=16)
    """The maximum memory of a call and of the processes that it started, in megabytes (2^20 bytes), in addition to what
    loading the function takes. A worker process that exceeds it is killed, and its sample fails. By default there is no
    limit."""

    calls_per_process: int | None = Field(default=1, ge=1)
    """The number of calls of a worker process, which is forked with the function loaded: with 1, no call sees what
    another one has changed. ``null``: each process loads the function itself, and serves calls until it is killed."""


class Isolation(NamedTuple):
    """What a function is marked with; ``None``: as in the options of the run."""

    max_processes: int | None = None
    max_memory_mb: int | None = None


@overload
def isolated(function: F, /) -> F: ...


@overload
def isolated(*, max_processes: int | None = None, max_memory_mb: int | None = None) -> Callable[[F], F]: ...


def isolated(
    function: F | None = None, /, *, max_processes: int | None = None, max_memory_mb: int | None = None
) -> F | Callable[[F], F]:
    """Mark a sync reward function or class to run in worker processes, which are killed at the deadline.

    The mark overrides ``isolation`` in the configuration. Options that are not given come from the configuration.

    Args:
        function: the function or class, if used as ``@isolated`` without arguments.
        max_processes: the maximum number of concurrent calls.
        max_memory_mb: the memory limit (in 2^20 bytes) of a process with its child processes.

    Example::

        @isolated(max_memory_mb=512)
        def compute_score(solution_str, ground_truth): ...
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, Isolation(max_processes, max_memory_mb))
        return function

    return mark if function is None else mark(function)


def is_isolated(target: Target) -> bool:
    """Whether the function is marked with `isolated`."""
    return _mark_of(target.origin) is not None


def in_processes(target: Target, options: ScoringOptions) -> WorkerProcesses:
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
    return WorkerProcesses(
        target.origin,
        target.constructor,
        name=target.name,
        files=file_modules(),
        max_processes=mark.max_processes or options.max_processes,
        max_memory_mb=mark.max_memory_mb or options.max_memory_mb,
        calls_per_process=options.calls_per_process,
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
