"""The bound on failed samples, past which a run stops."""

from __future__ import annotations

from collections import deque
from typing import Self

from reward_loop._util.causes import cause_of
from reward_loop.config import RewardLoopConfig
from reward_loop.errors import TooManyFailuresError
from reward_loop.limits.permit import Limits
from reward_loop.types import Outcome, RewardResult

__all__ = ["FailureBound", "SharedFailureBound", "failure_bound"]

_SHOWN = 3
"""How many causes a message names."""


class FailureBound:
    """Counts the latest outcomes; `count` raises once the share of failed ones passes the bound.

    Args:
        max_share: the share that may fail.
        min_samples: how many must have ended before it holds.
        window: how many of the latest are looked at.
        of: what is counted, for messages, if not whole samples.
    """

    def __init__(self, max_share: float, min_samples: int, window: int = 1024, of: str = "") -> None:
        self.of = of
        self.max_share = max_share
        self.min_samples = min_samples
        self._failed: deque[bool] = deque(maxlen=max(window, min_samples))
        self._failures = 0
        self._causes: dict[str, str] = {}

    @classmethod
    def of_options(cls, options: RewardLoopConfig, of: str = "") -> Self:
        """Return the bound that is configured."""
        return cls(options.max_failed_share, options.min_samples_for_failed_share, options.failed_share_window, of)

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: it failed, and more than ``max_share`` of the latest samples did.
        """
        self.add(result.outcome is Outcome.FAILED, result.error)

    def add(self, failed: bool, error: str | None) -> None:
        """Count one sample by whether it failed, and why; raises as `count` does."""
        if len(self._failed) == self._failed.maxlen:
            self._failures -= self._failed[0]
        self._failed.append(failed)
        self._failures += failed
        seen = len(self._failed)
        if not failed:
            return
        error = error or "(it did not say why)"
        self._causes.pop(cause_of(error), None)
        self._causes[cause_of(error)] = error
        if len(self._causes) > _SHOWN:
            del self._causes[next(iter(self._causes))]
        if seen >= self.min_samples and self._failures > self.max_share * seen:
            of = f"{self.of}: " if self.of else ""
            latest = "\n".join(f"- {error}" for error in reversed(self._causes.values()))
            raise TooManyFailuresError(
                f"{of}{self._failures} of the last {seen} samples failed, more than the share of {self.max_share:g} "
                f"that max_failed_share allows. Of each cause the latest:\n{latest}\n"
                "`reward-loop check` tries the function on a few rows. Where so many failures are to be expected, "
                "raise reward_loop.max_failed_share."
            )


class SharedFailureBound:
    """The bound on failures over all workers of a job; counts as `FailureBound` does.

    Args:
        limits: those of the job, which count.
        of: what is counted, if not whole samples.
    """

    def __init__(self, limits: Limits, of: str = "") -> None:
        self._limits = limits
        self._of = of

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: too large a share of the latest samples of the job failed.
            JobServiceError: the limiter service of the job cannot be reached.
        """
        self._limits.count(result.outcome is Outcome.FAILED, result.error, self._of)


def failure_bound(options: RewardLoopConfig, limits: Limits, of: str = "") -> FailureBound | SharedFailureBound:
    """Return the counter of failed samples: of the whole job if it has a service, else of one manager.

    Args:
        options: the bound, and the address of the job's service.
        limits: those of the job.
        of: what is counted, if not whole samples.
    """
    return SharedFailureBound(limits, of) if options.job else FailureBound.of_options(options, of)
