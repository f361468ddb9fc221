"""The failure bound: a run stops if the share of failed samples exceeds it."""

from __future__ import annotations

from collections import deque
from typing import Self

from reward_loop._util.text import first_line
from reward_loop.errors import TooManyFailuresError
from reward_loop.limits.client import RemoteLimits
from reward_loop.limits.options import JobOptions
from reward_loop.limits.permit import Limits
from reward_loop.types import Outcome, RewardResult

__all__ = ["FailureBound", "SharedFailureBound", "failure_bound"]

_SHOWN = 3
"""The maximum number of causes that an error message lists."""


class FailureBound:
    """Counts recent outcomes; `count` raises if the share of failed samples exceeds the bound.

    Args:
        max_share: the allowed share of failed samples, from 0 to 1.
        min_samples: the number of outcomes before the bound applies.
        window: the number of recent outcomes that are counted; at least ``min_samples``.
        of: the name of the counted component, for messages; ``""`` for whole samples.
    """

    def __init__(self, max_share: float, min_samples: int, window: int = 1024, of: str = "") -> None:
        self.of = of
        self.max_share = max_share
        self.min_samples = min_samples
        # A smaller window than `min_samples` would never fill up to it: the bound would never apply.
        self._failed: deque[bool] = deque(maxlen=max(window, min_samples))
        self._causes: dict[str, str] = {}

    @classmethod
    def of_options(cls, options: JobOptions, of: str = "") -> Self:
        """Return the failure bound configured in the options."""
        return cls(options.max_failed_share, options.min_samples_for_failed_share, options.failed_share_window, of)

    def count(self, result: RewardResult) -> None:
        """Count one sample.

        Raises:
            TooManyFailuresError: the sample failed, and so did more than ``max_share`` of the recent samples.
        """
        self.add(result.outcome is Outcome.FAILED, result.error, result.cause)

    def add(self, failed: bool, error: str | None, cause: str | None) -> None:
        """Count one sample, with its error message and cause if it failed; raises as `count` does."""
        self._failed.append(failed)
        if not failed:
            return
        error = error or "(no error message)"
        cause = cause or first_line(error)
        # Inserted again, so that the dictionary has the latest causes last.
        self._causes.pop(cause, None)
        self._causes[cause] = error
        if len(self._causes) > _SHOWN:
            del self._causes[next(iter(self._causes))]
        # Counted only after a failure, so a run whose samples succeed does not pay for the sum.
        failures, seen = sum(self._failed), len(self._failed)
        if seen >= self.min_samples and failures > self.max_share * seen:
            of = f"{self.of}: " if self.of else ""
            latest = "\n".join(f"- {error}" for error in reversed(self._causes.values()))
            raise TooManyFailuresError(
                f"{of}{failures} of the last {seen} samples failed, more than the share of {self.max_share:g} "
                f"that max_failed_share allows. The latest failure of each cause:\n{latest}\n"
                "Try the function on a few rows with `reward-loop check`. If this many failures are expected, raise "
                "max_failed_share (in a verl run reward_loop.max_failed_share, with a command -O max_failed_share)."
            )


class SharedFailureBound:
    """The failure bound over all workers of a job, counted by the limiter service; otherwise as `FailureBound`."""

    def __init__(self, limits: RemoteLimits, of: str = "") -> None:
        self._limits = limits
        self._of = of

    def count(self, result: RewardResult) -> None:
        """Count one sample; raises as `RemoteLimits.count` does."""
        self._limits.count(result, self._of)


def failure_bound(options: JobOptions, limits: Limits, of: str = "") -> FailureBound | SharedFailureBound:
    """Return the failure bound of the whole job if it has a limiter service, otherwise of one manager."""
    if options.job and isinstance(limits, RemoteLimits):
        return SharedFailureBound(limits, of)
    return FailureBound.of_options(options, of)
