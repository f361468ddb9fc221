"""Counts errors by cause."""

from __future__ import annotations

__all__ = ["Causes", "cause_of"]

_MAX_CAUSES = 1000
"""The maximum number of separate causes, which bounds the memory. Further causes share one entry."""


class Causes:
    """Counts the errors of samples by cause, and keeps the first error of each cause as the example."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, error: str) -> None:
        """Counts one error message of the form ``<sample>: <cause>``."""
        cause = cause_of(error)
        if cause not in self._found and len(self._found) >= _MAX_CAUSES:
            cause = ""
        count, example = self._found.get(cause, (0, error))
        self._found[cause] = (count + 1, example)

    def __len__(self) -> int:
        return len(self._found)

    def most_common(self, limit: int | None = None) -> list[tuple[int, str]]:
        """Returns the count and the example of each cause, the most frequent cause first; at most ``limit`` causes."""
        return sorted(self._found.values(), key=lambda found: -found[0])[:limit]


def cause_of(error: str) -> str:
    """Returns the error's first line without the name of its sample."""
    line = error.partition("\n")[0]
    return line.partition(": ")[2] or line
