"""The jobs that this process takes part in."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any

from reward_loop.config import RewardLoopConfig
from reward_loop.errors import ConfigError, JobServiceError
from reward_loop.limits.client import RemoteJob
from reward_loop.limits.failures import FailureBound
from reward_loop.limits.local import JobState
from reward_loop.limits.permit import Job
from reward_loop.records import answers
from reward_loop.types import Outcome, RewardResult

__all__ = ["SharedFailureBound", "failure_bound", "job_of"]

_LOOP_S = 4.0
"""Seconds within which an event loop must answer for its jobs; less than those who ask wait for the process."""

_jobs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, JobState | RemoteJob]] = (
    weakref.WeakKeyDictionary()
)


def job_of(options: RewardLoopConfig) -> Job:
    """Return the job of these options in the running loop: the same one for all that have the same options.

    With ``options.job``, it is a connection to the service that keeps it for all processes.
    """
    jobs = _jobs.setdefault(asyncio.get_running_loop(), {})
    shared = {"limits", "budget", "max_failed_share", "min_samples_for_failed_share", "failed_share_window"}
    key = options.job or options.model_dump_json(include=shared)
    job = jobs.get(key)
    if job is None:
        job = jobs[key] = RemoteJob(options.job, options) if options.job else JobState(options)
    return job


class SharedFailureBound:
    """The bound on failures over all workers of a job; counts as `FailureBound` does."""

    def __init__(self, options: RewardLoopConfig, of: str = "") -> None:
        self._options = options
        self._of = of

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: too large a share of the latest samples of the job failed.
            JobServiceError: the job's service cannot be reached.
        """
        job_of(self._options).count(result.outcome is Outcome.FAILED, result.error, self._of)


def failure_bound(options: RewardLoopConfig, of: str = "") -> FailureBound | SharedFailureBound:
    """Return what counts failed samples: those of the whole job where it has a service, else a manager's own.

    Args:
        options: the bound, and the job.
        of: what is counted, if not whole samples, but what each has of that name.
    """
    return SharedFailureBound(options, of) if options.job else FailureBound.of_options(options, of)


def _each(do: Callable[[JobState | RemoteJob], Coroutine[Any, Any, Any]], name: str | None = None) -> Iterator[Any]:
    """Do something with every job of this process, or those of a name, each on its own event loop; from any thread.

    Yields:
        The job, what came of it, and why nothing came of it.
    """
    until = time.monotonic() + _LOOP_S
    for loop in filter(None, (reference() for reference in _jobs.keyrefs())):
        for job in list(_jobs[loop].values()) if loop.is_running() else ():
            if name not in (None, job.name):
                continue
            doing = do(job)
            try:
                done = asyncio.run_coroutine_threadsafe(doing, loop)
            except RuntimeError:  # the loop has just been closed, and the job has ended with it
                doing.close()
                continue
            try:
                yield job, done.result(max(0.0, until - time.monotonic())), None
            except TimeoutError:
                done.cancel()
                yield job, None, "its event loop is blocked, or does not come to answer"
            except CancelledError:  # the loop is about to end
                continue
            except (ConfigError, JobServiceError) as error:
                yield job, None, str(error)


def _limits() -> list[dict[str, Any]]:
    """Answer ``reward-loop limits``: the state of each job that this process takes part in."""

    async def status(job: JobState | RemoteJob) -> dict[str, Any]:
        return job.status() if isinstance(job, JobState) else await job.status()

    return [{"job": job.name, **(found or {}), "error": error} for job, found, error in _each(status)]


def _configure(name: str, limit: str, changes: dict[str, Any]) -> None:
    """Answer ``reward-loop limits NAME OPTION=VALUE``: change a limit of the job of that name.

    Raises:
        ConfigError: an option is wrong, or the job is gone or does not answer.
    """

    async def configure(job: JobState | RemoteJob) -> None:
        if isinstance(job, JobState):
            job.configure(limit, changes)
        else:
            await job.configure(limit, changes)

    errors = [error for _, _, error in _each(configure, name)]
    if not errors:
        raise ConfigError(f"the job {name} has ended")
    for error in filter(None, errors):
        raise ConfigError(error)


answers["limits"] = _limits
answers["configure"] = _configure
