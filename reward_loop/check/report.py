"""The report of a check: the results of the samples, and the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Callee", "Finding", "Report", "Row"]

Status = Literal["ok", "note", "problem", "skipped"]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one sample."""

    uid: str
    outcome: str
    score: float | None
    seconds: float
    """Run time of the function, in seconds."""
    components: Mapping[str, Any]
    error: str

    @property
    def shown(self) -> str:
        """Outcome and score, for a message."""
        return self.outcome if self.score is None else f"{self.outcome} {self.score:.6g}"

    def same(self, other: Row) -> bool:
        """Return whether both have the same outcome and score."""
        return (self.outcome, self.score) == (other.outcome, other.score)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    text: str
    """What was observed and, for a problem, what to change."""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that the check calls."""

    name: str
    """Name and file of the function. For a composite, the name of the component precedes them."""
    is_async: bool
    in_processes: bool


@dataclass(slots=True)
class Report:
    """The report on a function, or on all functions of a composite."""

    functions: list[Callee]
    """The function, or the functions of the components of a composite."""
    of_lists: bool = False
    """Whether the function takes lists of samples. Such a function is called with all samples at once."""
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """The findings that should be fixed before a run."""
        return [finding for finding in self.findings if finding.status == "problem"]
