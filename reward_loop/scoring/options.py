"""How the user's function is called: `ScoringOptions`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reward_loop.limits.options import JobOptions
from reward_loop.records.options import RecordOptions


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
    """The maximum memory of a call and its child processes, in megabytes (2^20 bytes). The memory for loading the
    function counts only with ``calls_per_process: null``. A worker process that exceeds the maximum is killed, and its
    sample fails. By default there is no maximum."""

    calls_per_process: int | None = Field(default=1, ge=1)
    """The number of calls of a worker process, which is forked with the function loaded: with 1, no call sees what
    another one has changed. ``null``: each process loads the function itself, and serves calls until it is killed."""
