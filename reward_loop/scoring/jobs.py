"""The jobs that this process takes part in."""

from __future__ import annotations

import asyncio
import weakref

from reward_loop.config import RewardLoopConfig
from reward_loop.scoring.failures import FailureBound
from reward_loop.scoring.job import Job
from reward_loop.scoring.remote import RemoteJob
from reward_loop.scoring.state import JobState
from reward_loop.types import Outcome, RewardResult

__all__ = ["SharedFailureBound", "failure_bound", "job_of"]

_jobs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Job]] = weakref.WeakKeyDictionary()


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

    def __init__(self, options: RewardLoopConfig) -> None:
        self._options = options

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: too large a share of the latest samples of the job failed.
            JobServiceError: the job's service cannot be reached.
        """
        job_of(self._options).count(result.outcome is Outcome.FAILED, result.error)


def failure_bound(options: RewardLoopConfig) -> FailureBound | SharedFailureBound:
    """Return what counts failed samples: those of the whole job where it has a service, else a manager's own."""
    if options.job:
        return SharedFailureBound(options)
    return FailureBound(options.max_failed_share, options.min_samples_for_failed_share, options.failed_share_window)
