"""How much judging is hidden: the one definition, for verl's metrics, TRL's, the report and the viewer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["Interval", "hidden_share", "seconds_of", "union"]

Interval = tuple[float, float]
"""Start and end in seconds."""


def hidden_share(waiting_s: float, pending_s: float) -> float | None:
    """Return the share of the time with pending rewards in which the trainer did not wait for them.

    Args:
        waiting_s: seconds for which the trainer waited for the rewards of a step, and for nothing else.
        pending_s: seconds in which at least one reward of the step was pending: requested, and not arrived. A reward
            belongs to the step that trains on it.

    Returns:
        from 0 to 1; ``None`` if no reward was pending.
    """
    return max(0.0, 1 - waiting_s / pending_s) if pending_s > 0 else None


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the union of intervals as intervals that do not overlap."""
    begun: float | None = None
    until = 0.0
    for start, end in sorted(intervals):
        if begun is None or start > until:
            if begun is not None:
                yield begun, until
            begun, until = start, end
        until = max(until, end)
    if begun is not None:
        yield begun, until


def seconds_of(intervals: Iterable[Interval]) -> float:
    """Return the seconds in which at least one of the intervals runs."""
    return sum(end - start for start, end in union(intervals))
