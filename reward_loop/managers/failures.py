"""How many samples without a score a step, a batch or a period has, and why, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from reward_loop._util.text import counted, cut, first_line
from reward_loop.types import Outcome, RewardResult

_MAX_CAUSES = 1000
"""The largest number of separate causes, which bounds the memory. Further causes share one entry."""

_EXAMPLE = 300
"""The largest number of characters of the first error."""


class Failures:
    """Counts samples by outcome, and those without a score by cause."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._causes: dict[str, tuple[int, str]] = {}
        """For each cause, the number of samples and the first error."""

    @classmethod
    def of(cls, results: Iterable[RewardResult]) -> Self:
        """Return the counts of some samples, whose results are given."""
        found = cls()
        for result in results:
            found.add(result)
        return found

    def add(self, result: RewardResult) -> bool:
        """Count a sample. Return whether it is the first one with its cause."""
        self._outcomes[result.outcome] += 1
        if result.outcome is Outcome.SCORED:
            return False
        error = result.error or ""
        cause = result.cause or first_line(error)
        if len(self._causes) >= _MAX_CAUSES and cause not in self._causes:
            cause = "other causes"
        count, first = self._causes.get(cause, (0, error))
        self._causes[cause] = count + 1, first
        return count == 0

    def line(self, see: str | None = None) -> str | None:
        """Return how many samples have no score, the most frequent cause and its first error; ``None`` if all have one.

        Args:
            see: the command that shows these samples.
        """
        if not self._causes:
            return None
        without = (name for name in (Outcome.FAILED, Outcome.UNSCORED) if self._outcomes[name])
        line = " and ".join(f"{self._outcomes[name]} {name}" for name in without)
        line += f" of {counted(self._outcomes.total(), 'sample')}"
        cause, (count, error) = max(self._causes.items(), key=lambda found: found[1][0])
        if len(self._causes) > 1:
            line += f"; the most frequent of {len(self._causes)} causes, {counted(count, 'time')}"
        line += f": {cause}"
        if error:
            line += f"; first: {on_one_line(error)}"
        return f"{line}. To see them: {see}" if see else line


def on_one_line(error: str) -> str:
    """Return the first line of an error, at most 300 characters of it."""
    return cut(" ".join(error.partition("\n")[0].split()), _EXAMPLE)
