"""What all calls of a job share, as they see it: its limits, its budget, and the count of its failures."""

from __future__ import annotations

from typing import Protocol

__all__ = ["DEFAULT", "RETRY", "Job", "Place"]

DEFAULT = "default"
"""The limit that holds for every call of the function."""

RETRY = "retry"
"""The limit that holds for every call that is made again, besides."""


class Place(Protocol):
    """One call's place within a limit; it must `leave`."""

    def used(self, tokens: float) -> None:
        """Correct the estimate of its tokens."""

    def leave(self, refused: bool = False, retry_after: float | None = None) -> None:
        """The call has ended; ``refused`` if the service said that it is too much."""


class Job(Protocol):
    """What a reward function's calls ask before they are made, and report to afterwards."""

    name: str
    """Of the job, for people."""
    limited: frozenset[str]
    """The names of the limits there are."""
    spent: str | None
    """Why no more calls are made: the budget is used up."""

    async def enter(self, name: str, tokens: float, share: str) -> Place:
        """Wait for a place within a limit.

        Raises:
            LimitError: there will be none for this call.
            JobServiceError: whoever keeps the limits cannot be reached.
        """

    def spend(self, cost: float, tokens: float) -> None:
        """Count what a call used."""

    def count(self, failed: bool, error: str | None, of: str = "") -> None:
        """Count one sample, or what ``of`` names in it.

        Raises:
            TooManyFailuresError: too large a share of the latest samples failed.
            JobServiceError: whoever counts cannot be reached.
        """

    async def why_stopped(self) -> str | None:
        """Say why the run must stop, if it must."""
