"""The critical path of a training step: the sequence of phases and of work for samples that determines its duration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reward_loop.records import STEP

TRAINER = "trainer"
"""The lane of the trainer's phases."""

OTHER = "other"
"""The name of the time of a step outside of its phases."""

JUDGING, QUEUE, GENERATION = "judging", "queue", "generation"
"""Parts of the critical path while the trainer waits for a sample: judging, waiting for a judge, generation."""

LATE_S = 0.05
"""Tolerance in seconds for arrivals after the end of the wait for them: clocks of nodes differ."""

SHORTEST_S = 0.001
"""The shortest duration of a segment in seconds; shorter segments are left out."""

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
    """The work for one sample until its reward arrived. Unknown times are ``None``."""

    uid: str
    group: str | None
    id: str | None
    start: float | None
    """When generation began."""
    generated: float | None
    scoring: float | None
    """When the reward was requested."""
    scored: float | None
    """When the reward arrived."""
    step: int | None = None
    """The step in which its prompt was submitted, or else the one that trains on it."""
    judge: str = ""
    """The longest exchange with a judge, or the function, and its seconds, as text."""


def works(rollouts: Iterable[Row], rows: Iterable[Row]) -> list[Work]:
    """Return the work for each sample of training: of rollouts, and of rows that have no event of a rollout."""
    by_uid = {row.get("uid"): row for row in rows if not row.get("validate")}
    found = []
    for event in rollouts:
        row = by_uid.pop(event.get("uid"), None)
        if not event.get("validate"):
            found.append(work_of(event, row))
    for uid, row in by_uid.items():
        begun = scoring_start(row)
        event = {**row, "uid": str(uid), "start": None, "end": begun, "scoring": begun, "scored": row["time"]}
        found.append(work_of(event, row))
    return found


def work_of(rollout: Row, row: Row | None = None) -> Work:
    """Return the work for the sample of a rollout.

    Args:
        rollout: the event of the rollout.
        row: the row of the sample, if there is one.
    """
    scoring, scored = rollout.get("scoring"), rollout.get("scored")
    if row is not None and scored is None:  # scored with the whole batch
        scoring, scored = scoring_start(row), row["time"]
    return Work(
        rollout["uid"],
        rollout.get("group"),
        None if row is None else row.get("id"),
        rollout["start"],
        rollout["end"],
        scoring,
        scored,
        _generated_step(rollout),
        "" if row is None else _longest(row),
    )


def _generated_step(row: Row) -> int | None:
    step: int | None = row.get("generated_step")
    return row.get("step") if step is None else step


def scoring_start(row: Row) -> float:
    """Return when the scoring of a sample began, in seconds since 1970."""
    return row["time"] - (row.get("total_s") or 0.0)


def _longest(row: Row) -> str:
    judges = row.get("judges") or ()
    if judges:
        longest = max(judges, key=lambda judge: judge.get("seconds") or 0.0)
        return f"judge {server_of(longest)} took {longest.get('seconds') or 0.0:.1f} s"
    return f"{row.get('function')} took {row.get('work_s') or 0.0:.1f} s"


def server_of(judge: Row) -> str:
    """Return the model and the server of an exchange."""
    return " at ".join(str(part) for part in (judge.get("model"), judge.get("backend")) if part) or str(
        judge.get("url")
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the critical path."""

    part: str
    """The name of a phase, or one of `JUDGING`, `QUEUE`, `GENERATION`."""
    start: float
    end: float
    waits_for: str | None = None
    work: Work | None = None
    """The sample that the trainer waited for."""

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The part, and the sample that the trainer waited for."""
        return self.part if self.work is None else f"{self.part} of {self.work.uid}"

    def to_dict(self) -> dict[str, Any]:
        """Return the segment as JSON values. The lane is ``rollouts``, ``queue``, ``judging``, or the trainer's."""
        lane = {JUDGING: "judging", QUEUE: "queue", GENERATION: "rollouts"}.get(self.part, TRAINER)
        sample = None if self.work is None else self.work.id
        return {"lane": lane, "name": self.name, "start": self.start, "end": self.end, "id": sample}


def critical_path(phases: Sequence[Phase], works: Sequence[Work]) -> list[Segment]:
    """Return the segments of the critical path, in order. They do not overlap.

    The trainer does one thing at a time. Where it waits, the path leads through the sample whose response or reward
    arrived last.

    Args:
        phases: the outermost phases of the step.
        works: the work for the samples whose responses or rewards may have arrived in the step.
    """
    path: list[Segment] = []
    for phase in phases:
        for segment in _flat(phase):
            for piece in expand(segment, works):
                if path and path[-1].part == piece.part and path[-1].work is piece.work:
                    path[-1] = replace(path[-1], end=piece.end)
                elif piece.seconds >= SHORTEST_S:
                    path.append(piece)
    return path


def _flat(phase: Phase) -> Iterator[Segment]:
    name = OTHER if phase.name == STEP else phase.name
    begun = phase.start
    for part in phase.parts:
        yield Segment(name, begun, max(begun, part.start), phase.waits_for)
        yield from _flat(part)
        begun = part.end
    yield Segment(name, begun, max(begun, phase.end), phase.waits_for)


def expand(wait: Segment, works: Iterable[Work]) -> list[Segment]:
    """Return a segment as it is, or, if the trainer waited, the work for the sample that arrived last.

    Args:
        wait: a segment of the trainer.
        works: the work for samples.
    """
    if wait.waits_for is None:
        return [wait]
    for_rewards = wait.waits_for == "rewards"
    arrived = [(at, work) for work in works if (at := arrival(work, for_rewards)) is not None]
    arrived = [(at, work) for at, work in arrived if wait.start < at <= wait.end + LATE_S]
    if not arrived:
        return [wait]
    at, work = max(arrived, key=lambda found: found[0])
    edges = [(GENERATION, work.start, work.generated)]
    if for_rewards:
        edges += [(QUEUE, work.generated, work.scoring), (JUDGING, work.scoring, at)]
    pieces, reached = [], wait.start
    for part, start, end in edges:
        if start is None or end is None:
            continue
        start, end = max(start, reached), min(end, wait.end)
        if end - start < SHORTEST_S:
            continue
        if start > reached:
            pieces.append(replace(wait, start=reached, end=start))
        pieces.append(Segment(part, start, end, wait.waits_for, work))
        reached = end
    return [*pieces, replace(wait, start=reached)]


def arrival(work: Work, for_rewards: bool) -> float | None:
    """Return when the response of a sample, or its reward, arrived; ``None`` if unknown."""
    return work.scored if for_rewards and work.scored is not None else work.generated


def bound(path: Sequence[Segment]) -> str | None:
    """Return a sentence that names what took the largest part of a critical path; ``None`` for an empty path."""
    if not path:
        return None
    seconds: dict[str, float] = defaultdict(float)
    for segment in path:
        seconds[segment.part] += segment.seconds
    part = max(seconds, key=lambda name: seconds[name])
    share = f"{seconds[part]:.1f} s of {path[-1].end - path[0].start:.1f} s"
    longest = max((segment for segment in path if segment.part == part), key=lambda segment: segment.seconds)
    if longest.work is None:
        rest = ", without the rollouts and rewards that it waited for" if longest.waits_for else ""
        return f"The phase {part} bounded the step: {share}{rest}."
    sample = f"sample {longest.work.uid}" + (f" of group {longest.work.group}" if longest.work.group else "")
    what = {JUDGING: "Judging", QUEUE: "The queue before the judges"}.get(part, "Generation")
    judge = f" ({longest.work.judge})" if part == JUDGING and longest.work.judge else ""
    return f"{what} bounded the step: {share} of waiting, longest for {sample}{judge}."
