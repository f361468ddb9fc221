"""The times of training steps, from the trainer's events: nested phases, and the share of judging they have hidden."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reward_loop.records import EVENTS, OVERLAP, PHASE, STEP, check_version, hidden_share, parse_line

_HEAD = 64
"""The field ``kind`` of an event is within this number of bytes from the start of its line."""

_WANTED = re.compile(rf'"kind":\s*"({PHASE}|{OVERLAP})"'.encode())

OTHER = "other"
"""The name of the time of a step outside of its phases."""

Row = Mapping[str, Any]
"""An event, or the row of a sample."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the trainer, with the phases within it."""

    name: str
    step: int
    start: float
    end: float
    waits_for: str | None
    parts: tuple[Phase, ...] = ()

    @property
    def seconds(self) -> float:
        """The duration in seconds, without the phases within this one."""
        return self.end - self.start - sum(part.end - part.start for part in self.parts)

    def from_time(self, start: float) -> Phase:
        """Return this phase and those within it, none of which begins before ``start``."""
        if self.start >= start:
            return self
        return replace(self, start=start, parts=tuple(part.from_time(start) for part in self.parts))

    def all(self) -> Iterator[Phase]:
        """Yield this phase and all phases within it."""
        yield self
        for part in self.parts:
            yield from part.all()


def nest(events: Iterable[Row]) -> list[Phase]:
    """Return the outermost phases, each with the phases within it.

    Args:
        events: the events of phases of one trainer, in the order of their ends, which is that of the file.
    """
    found: list[Phase] = []
    for event in events:
        start, end = event["start"], event["end"]
        first = len(found)
        # The start is computed from the end, so a part may seem to begin before its phase: its middle is compared.
        while first and (found[first - 1].start + found[first - 1].end) / 2 >= start:
            first -= 1
        if first:
            start = max(start, found[first - 1].end)
        parts = tuple(part.from_time(start) for part in found[first:])
        found[first:] = [Phase(event["name"], event["step"], start, end, event.get("waits_for"), parts)]
    return found


class StepTimes:
    """The times of each training step, in a folder that may still grow.

    Example::

        times = StepTimes(Path("checkpoints/rewards"))
        times.steps()[3]["phases"]["update_actor"]

    Args:
        folder: a records folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / EVENTS
        self._offsets: dict[Path, int] = defaultdict(int)
        self._open: dict[Path, list[Row]] = defaultdict(list)
        """The phases of each process since its last complete step."""
        self._steps: dict[int, Phase] = {}
        self._overlaps: dict[int, Row] = {}

    def steps(self, resumed: Collection[Row] = ()) -> dict[int, dict[str, Any]]:
        """Read the events that were written since the last call, and return the times of each step.

        Args:
            resumed: the ``time`` and ``step`` of each trainer that has continued from a checkpoint, see
                `questions.resumed`. What an earlier trainer did after that step does not count.

        Returns:
            for each step: ``phases``, the seconds of each phase without the phases within it, which add up to the step,
            ``None`` if the step has not ended; and, as far as the trainer has measured them, ``waiting_s``,
            ``pending_s`` and ``hidden_share``, see `reward_loop.records.trainer_events`.

        Raises:
            ConfigError: a newer version of the library has written the events.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            for event in self._events(path):
                self._add(path, event)
        # Not deleted: the events may be read before the row of the trainer that has continued.
        steps = {step: phase for step, phase in self._steps.items() if _counts(step, phase.end, resumed)}
        overlaps = {step: event for step, event in self._overlaps.items() if _counts(step, event["time"], resumed)}
        return {step: _times(steps.get(step), overlaps.get(step)) for step in sorted(steps.keys() | overlaps.keys())}

    def _add(self, path: Path, event: Row) -> None:
        # A resumed run repeats some steps: the latest of each counts.
        step = event["step"]
        if event["kind"] == OVERLAP:
            if event["time"] >= self._overlaps.get(step, event)["time"]:
                self._overlaps[step] = event
            return
        self._open[path].append(event)
        if event["name"] == STEP:
            phase = next(phase for phase in reversed(nest(self._open.pop(path))) if phase.name == STEP)
            if step not in self._steps or self._steps[step].start < phase.start:
                self._steps[step] = phase

    def _events(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the new phases and overlaps of a file. Rollouts, of which there may be millions, are not parsed."""
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offsets[path] += len(line)
                if _WANTED.search(line, 0, _HEAD) and (event := parse_line(line)) is not None:
                    check_version(event.get("version", 0), path)
                    yield event


def _counts(step: int, time: float, resumed: Collection[Row]) -> bool:
    """Return whether no later trainer has continued from a checkpoint before this step."""
    return not any(time < row["time"] and step > row["step"] for row in resumed)


def _times(whole: Phase | None, overlap: Row | None) -> dict[str, Any]:
    phases: dict[str, float] | None = None
    if whole is not None:
        phases = defaultdict(float)
        for phase in whole.all():
            phases[OTHER if phase.name == STEP else phase.name] += phase.seconds
    waiting, pending = (None, None) if overlap is None else (overlap["waiting_s"], overlap["pending_s"])
    share = None if waiting is None or pending is None else hidden_share(waiting, pending)
    return {"phases": phases, "waiting_s": waiting, "pending_s": pending, "hidden_share": share}
