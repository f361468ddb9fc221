"""The counts of probes over a window of steps, and what of their shares is not chance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from reward_loop._util.intervals import wilson
from reward_loop.audit.values import ProbeCounts

__all__ = ["CANARY", "LABELLED", "REFERENCE", "ProbeHistory", "fall", "wilson_lower"]

CANARY = "canary/"
"""The start of the names of the kinds of canaries."""

LABELLED = "labelled"
"""The kind of the labelled answers: many probes in one step, and then none for several steps."""

REFERENCE = "reference"
"""The kind of the answers that the reference judge rejects."""

CANARY_ERRORS = 4.0
"""Half the width of Wilson's interval, in standard errors. Many kinds are tested in each step: with fewer standard
errors, chance gives a warning in some runs of 1,000 steps."""

FALL_ERRORS = 3.0
"""A fall is real if it is larger than this number of its standard errors. In simulated runs of 1,000 steps without a
fall, chance gives at most about one warning in 30 runs."""

MIN_CANARIES = 5
"""With fewer canaries of a kind in the window, their share is not compared with the limit."""

MIN_PROBES = 32
"""A fall is computed from at least this number of probes, in the baseline and in the window."""


class ProbeHistory:
    """The probes of one kind: the first ones, and those of the latest steps.

    Args:
        baseline_steps: the smallest number of steps of the baseline.
        window: the number of latest steps.
    """

    def __init__(self, baseline_steps: int, window: int) -> None:
        self._baseline_steps = baseline_steps
        self._window = window
        self._steps: deque[tuple[int, ProbeCounts]] = deque()
        self._first: list[ProbeCounts] = []

    def add(self, step: int, counts: ProbeCounts) -> None:
        """Add the probes of a step."""
        self._steps.append((step, counts))
        while self._steps[0][0] <= step - self._window:
            self._steps.popleft()
        if len(self._first) < self._baseline_steps or self.first.asked < MIN_PROBES:
            self._first.append(counts)

    @property
    def first(self) -> ProbeCounts:
        """The baseline: the first steps with probes, until there are at least `MIN_PROBES`."""
        return _total(self._first)

    @property
    def recent(self) -> ProbeCounts:
        """The probes of the window."""
        return _total(counts for _, counts in self._steps)


def _total(steps: Iterable[ProbeCounts]) -> ProbeCounts:
    pairs = [(counts.asked, counts.accepted) for counts in steps]
    return ProbeCounts(sum(asked for asked, _ in pairs), sum(accepted for _, accepted in pairs))


def wilson_lower(counts: ProbeCounts) -> float:
    """Return the lower bound of the confidence interval of the accepted share, by Wilson's formula.

    0 with fewer than `MIN_CANARIES` probes.

    Example::

        wilson_lower(ProbeCounts(asked=32, accepted=19))  # 0.28
    """
    if counts.asked < MIN_CANARIES:
        return 0.0
    return wilson(counts.accepted, counts.asked, CANARY_ERRORS)[0]


def fall(first: ProbeCounts, recent: ProbeCounts) -> tuple[float, float] | None:
    """Return how far the accepted share fell, and this number again if it is not chance; otherwise 0.

    ``None`` if one of both has fewer than `MIN_PROBES` probes.
    """
    if min(first.asked, recent.asked) < MIN_PROBES:
        return None
    pooled = (first.accepted + recent.accepted) / (first.asked + recent.asked)
    error = math.sqrt(pooled * (1 - pooled) * (1 / first.asked + 1 / recent.asked))
    fallen = first.accepted / first.asked - recent.accepted / recent.asked
    return fallen, fallen if fallen > FALL_ERRORS * error else 0.0
