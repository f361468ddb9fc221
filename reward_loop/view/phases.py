"""The nested phases of training steps, their seconds, and the share of judging that other work has hidden."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from reward_loop.records import (
    EVENTS,
    OVERLAP,
    PHASE,
    ROLLOUT,
    STEP,
    Interval,
    check_version,
    hidden_share,
    parse_line,
    seconds_of,
    union,
)
from reward_loop.view.growth import Lines, new_lines

_REWARDS = ("reward", "wait_reward")
"""The phases in which the trainer waits only for rewards."""

_MANY = 1000
"""Above this number of intervals, overlapping intervals are merged."""

_HEAD = 64
"""The field ``kind`` of an event is within this number of bytes from the start of its line."""

OTHER = "other"
"""The name of the time of a step outside of its phases."""

LATE_S = 0.05
"""Tolerance in seconds for arrivals after the end of the wait for them: clocks of nodes differ."""

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


class Work(NamedTuple):
    """The times of the work for one sample until its reward arrived. Unknown times are ``None``."""

    start: float
    """When generation began."""
    generated: float
    scoring: float | None
    """When the reward was requested."""
    scored: float | None
    """When the reward arrived."""

    @property
    def arrival(self) -> float:
        """When the reward arrived; without a reward, when the response did."""
        return self.generated if self.scored is None else self.scored


class _Step:
    """A complete training step, with the rollouts whose rewards were pending during it."""

    def __init__(self, step: Phase, since: float) -> None:
        self.phase = step
        self.since = since
        """When the trainer that ran the step began. A resumed run repeats steps with other rollouts."""
        self.seconds: dict[str, float] = defaultdict(float)
        for phase in step.all():
            self.seconds[OTHER if phase.name == STEP else phase.name] += phase.seconds
        self._waits = [phase for phase in step.all() if phase.waits_for == "rewards"]
        self._last: dict[int, Work] = {}
        """For each wait, by its position: the work that arrived last in it."""

    def add(self, work: Work) -> None:
        """Add a rollout that overlaps with the step."""
        for i, wait in enumerate(self._waits):
            if wait.start < work.arrival <= wait.end + LATE_S and work.arrival >= self._last.get(i, work).arrival:
                self._last[i] = work

    def to_dict(self, has_rollouts: bool, overlap: Row | None, pending: Iterable[Interval]) -> dict[str, Any]:
        """Return the seconds by phase, the seconds of waiting for rewards, and the hidden share.

        Args:
            has_rollouts: whether rollouts are recorded.
            overlap: the event of the trainer that has measured the overlap itself.
            pending: when rewards of the step were pending, for other trainers.
        """
        waiting = 0.0
        for i, wait in enumerate(self._waits):
            if wait.name in _REWARDS:
                waiting += wait.seconds
            elif (last := self._last.get(i)) is not None:
                # Before its end, generation is what the trainer waited for.
                waiting += max(0.0, min(last.arrival, wait.end) - max(last.generated, wait.start))
        pending_s = seconds_of(one for one in pending if one[1] > self.since)
        is_known = has_rollouts or all(wait.name in _REWARDS for wait in self._waits)
        if overlap is not None:
            waiting, pending_s, is_known = overlap["waiting_s"], overlap["pending_s"], True
        return {
            "phases": dict(self.seconds),
            "waiting_s": waiting if is_known else None,
            "hidden_share": hidden_share(waiting, pending_s),
        }


class PhaseReader:
    """The seconds of each training step by phase, in a folder that may still grow.

    Example::

        reader = PhaseReader(Path("checkpoints/rewards"))
        reader.steps()[3]["phases"]["update_actor"]

    Args:
        folder: a records folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / EVENTS
        self._offsets: dict[Path, int] = {}
        self._open: dict[Path, list[Row]] = defaultdict(list)
        """The phases of each process since its last complete step."""
        self._began: dict[Path, float] = {}
        """When the first phase of each process began."""
        self._steps: dict[int, _Step] = {}
        self._later: list[tuple[float, Work]] = []
        """Rollouts that ended after the last complete step, each with the end of the last step that has them."""
        self._has_rollouts = False
        self._overlaps: dict[int, Row] = {}
        """The event of each step whose trainer has measured the overlap."""
        self._pending: dict[int, list[Interval]] = defaultdict(list)
        """For each step: when its rewards were pending."""
        self._arrived: list[Interval] = []
        """The same of the rewards of which only the time is known, after the last complete step."""

    def steps(self) -> dict[int, dict[str, Any]]:
        """Read the events that were written since the last call, and return the seconds of each complete step.

        Returns:
            for each step: ``phases``, the seconds of each phase without the phases within it, which add up to the step;
            ``waiting_s``, the seconds for which the trainer waited for rewards alone, ``None`` if that is not known
            because no rollouts are recorded; and ``hidden_share``, see `reward_loop.records.events`.

        Raises:
            ConfigError: a newer version of the library has written the events.
        """
        self._update()
        return {
            number: step.to_dict(self._has_rollouts, self._overlaps.get(number), self._pending[number])
            for number, step in sorted(self._steps.items())
        }

    def _update(self) -> None:
        """Read the events that were written since the last call."""
        paths = sorted(self._folder.glob("*.jsonl"))
        new = [lines for path in paths if (lines := new_lines(path, self._offsets.get(path, 0), sys.maxsize))]
        # Phases are read first, so that rollouts, of which there may be millions, can be assigned to steps one by one.
        for lines in new:
            for event in _events(lines, PHASE):
                self._open[lines.path].append(event)
                if event["name"] == STEP:
                    nested = nest(self._open.pop(lines.path))
                    since = self._began.setdefault(lines.path, nested[0].start)
                    self._add_step(next(phase for phase in reversed(nested) if phase.name == STEP), since)
        steps = sorted(self._steps.values(), key=lambda step: step.phase.start)
        ends = [step.phase.end for step in steps]
        later, self._later = self._later, []
        for known, work in later:
            self._assign(work, steps, ends, known)
        arrived, self._arrived = self._arrived, []
        for interval in arrived:
            self._pend(None, interval, steps, ends)
        for lines in new:
            for event in _events(lines, OVERLAP):
                measured = self._overlaps.setdefault(event["step"], event)
                self._overlaps[event["step"]] = max(measured, event, key=lambda one: one["time"])
        for lines in new:
            for event in _events(lines, ROLLOUT):
                if not event.get("validate"):
                    self._has_rollouts = True
                    work = Work(event["start"], event["end"], event.get("scoring"), event.get("scored"))
                    self._assign(work, steps, ends)
                    if work.scoring is not None and work.scored is not None:
                        self._pend(event.get("step"), (work.scoring, work.scored), steps, ends)
            self._offsets[lines.path] = lines.start + lines.bytes

    def _pend(self, step: int | None, interval: Interval, steps: Sequence[_Step], ends: Sequence[float]) -> None:
        """Note that a reward was pending: in the step that trains on it, or else in the one in which it arrived."""
        if step is None:
            place = bisect_left(ends, interval[1] - LATE_S)
            if place == len(steps):
                self._arrived.append(interval)
                return
            step = steps[place].phase.step
        found = self._pending[step]
        found.append(interval)
        if len(found) > _MANY:
            self._pending[step] = list(union(found))

    def _add_step(self, phase: Phase, since: float) -> None:
        known = self._steps.get(phase.step)
        if known is None or known.phase.start < phase.start:  # a resumed run repeats some steps
            self._steps[phase.step] = _Step(phase, since)

    def _assign(self, work: Work, steps: Sequence[_Step], ends: Sequence[float], known: float = 0.0) -> None:
        """Add a rollout to the steps that it overlaps with and that end after ``known``, in the order of steps."""
        last = max(work.scored or 0.0, work.generated)
        for step in steps[bisect_left(ends, max(work.start - LATE_S, known + LATE_S)) :]:
            if step.phase.start > last:
                break
            step.add(work)
        if not ends or last > ends[-1]:
            self._later.append((ends[-1] if ends else 0.0, work))


def _events(lines: Lines, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a kind in some lines."""
    mark = re.compile(rf'"kind":\s*"{kind}"'.encode())
    start, end = lines.start, lines.start + lines.bytes
    with lines.path.open("rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline()
            start += len(line)
            if mark.search(line, 0, _HEAD) and (event := parse_line(line)) is not None:
                check_version(event.get("version", 0), lines.path)
                yield event
