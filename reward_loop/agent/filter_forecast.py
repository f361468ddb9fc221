"""How many prompts to begin so that enough groups of a step pass a filter: `FilterForecast` of verl's trainer."""

from __future__ import annotations

import math

FADING = 0.75
"""The weight of a step's groups in the estimate, relative to those of the following step: about the last four count."""


class FilterForecast:
    """Estimates the share of groups that a filter removes, from the groups of the last steps.

    Args:
        most: the largest number of prompts that may be begun because the filter will probably remove others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = self._filtered = 0.0

    @property
    def share(self) -> float:
        """The estimated share of groups that the filter removes, below 1; 0 before the first group is removed."""
        # + 1, so that it is below 1: no number of prompts would be enough for a filter that removes all of them.
        return self._filtered / (self._kept + self._filtered + 1.0)

    def count(self, *, kept: int, filtered: int) -> None:
        """Record the filter's decisions on judged groups."""
        self._kept += kept
        self._filtered += filtered

    def end_step(self) -> None:
        """Reduce the weight of the groups so far."""
        self._kept *= FADING
        self._filtered *= FADING

    def missing(self, wanted: int, *, kept: int, pending: int, later: int = 0) -> int:
        """Return how many prompts to begin now.

        Without ``later``, it is 0 as long as the pending groups are expected to suffice; otherwise enough are begun for
        a margin of two standard deviations. With it, the step takes some of the next step's groups if it needs more,
        and the next step gets two standard deviations fewer than it needs: it can begin more, but what it does not
        need would become too old.

        Args:
            wanted: the number of groups that a step trains on.
            kept: the number of judged groups that have passed the filter.
            pending: the number of groups that are being generated or judged.
            later: the number of groups that the next step trains on, if its prompts are begun now.
        """
        short = max(0, wanted - kept)
        if later:
            for_later = self._prompts(max(0, later - max(0, kept - wanted)), deviations=-2)
            needed = self._prompts(short, deviations=0) + for_later - pending
        elif (1 - self.share) * pending >= short:
            needed = 0
        else:
            needed = self._prompts(short, deviations=2) - pending
        return max(0, min(needed, wanted + later + self._most - kept - pending))

    def _prompts(self, groups: int, *, deviations: float) -> int:
        """Return the number of prompts n of which ``groups`` pass the filter: n p - deviations sqrt(n f p) = groups.

        f is the share that it removes, and p = 1 - f. The number that passes is binomial.
        """
        share = self.share
        half = deviations * math.sqrt(share) / 2
        return math.ceil((half + math.sqrt(half**2 + groups)) ** 2 / (1 - share)) if share else groups
