"""What a trainer records beside the samples: its events, as they are read, and the health of the run.

There are three kinds of events; docs/records.md describes their fields:

- a *phase* of the trainer, such as generation or an update, under the name of verl's timing;
- a *rollout*: when a response was generated, and when its reward was requested and arrived;
- an *overlap*: for how long the trainer waited in a step, and for how long its rewards were pending. `hidden_share` is
  the one definition of how much judging is hidden, for verl's metrics, TRL's, the report and the viewer.

The health of a run is its live numbers in each step, and their warnings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_loop.records.files import EVENTS, HEALTH
from reward_loop.records.reader import has_step, read_files, read_rows
from reward_loop.records.writer import CLOSING_S, new_row, records

STEP = "step"
"""The name of the phase that contains the phases of a training step."""


def read_events(folder: Path, steps: Collection[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events in a records folder, of some steps or of all, in the order of each file.

    Incomplete lines are left out. Each event gets a field ``process``, which names the process that wrote it.

    Raises:
        ConfigError: a newer version has written them.
    """
    for path, event in read_files(folder / EVENTS, None if steps is None else lambda line: has_step(line, steps)):
        if event is not None:
            yield {**event, "process": path.stem}


VALUES, WARNING = "values", "warning"
"""The kinds of rows."""

_FIELDS = ("step", "monitor", "message", "value", "threshold", "since")


class HealthRecords:
    """Writes the health of a run into a records folder."""

    def __init__(self, folder: str | Path) -> None:
        self._records = records(Path(folder) / HEALTH)

    def write_values(self, step: int, values: Mapping[str, float]) -> None:
        """Record the live numbers of a step."""
        self._records.write_rows([new_row(VALUES, step=step, values=values)])

    def write_warnings(self, warnings: Sequence[Mapping[str, Any]]) -> None:
        """Record warnings, each with the fields that `health` returns."""
        self._records.write_rows([new_row(WARNING, **warning) for warning in warnings])

    def flush(self, timeout: float = CLOSING_S) -> bool:
        """Wait until all rows are written, see `Records.flush`."""
        return self._records.flush(timeout)


def health(folder: Path) -> list[dict[str, Any]]:
    """Return the warnings in a records folder by step, each with step, monitor, message, value, threshold and since.

    Raises:
        ConfigError: a newer version has written them.
    """
    found = _health_rows(folder, WARNING)
    found.sort(key=lambda row: (row.get("time") or 0.0, row.get("step") or 0))
    return [{name: row.get(name) for name in _FIELDS} for row in found]


def live_numbers(folder: Path) -> dict[int, dict[str, float]]:
    """Return the live numbers of each step in a records folder; of a step that a resumed run repeats, the latest.

    Raises:
        ConfigError: a newer version has written them.
    """
    rows = sorted(_health_rows(folder, VALUES), key=lambda row: row["time"])
    return {row["step"]: row["values"] for row in rows}


def _health_rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / HEALTH) if row.get("kind") == kind]


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
