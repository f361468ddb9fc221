"""The timeline of a training step: lanes of spans, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_loop.errors import ConfigError
from reward_loop.records.events import PHASE, ROLLOUT, STEP, read_events
from reward_loop.records.reader import RecordsReader
from reward_loop.view.critical import Phase, bound, critical_path, nest
from reward_loop.view.spans import TRAINER, Span, judge_spans, rollout_spans, scoring_start, works

__all__ = ["MAX_SPANS", "StepSpans", "near_steps", "order", "read_step", "step_phases", "timeline"]

MAX_SPANS = 5000
"""The largest number of spans of a timeline. The shortest ones are left out; those of the trainer stay."""

OLDER, NEWER = 3, 1
"""The largest difference between a step and the step of a sample that is drawn in it: a step may train on rollouts of
earlier steps, and rollouts of the next step are generated at the same time."""

Row = Mapping[str, Any]


def step_phases(events: Iterable[Row], step: int) -> list[Phase]:
    """Return the outermost phases of a step, of the trainer that ran it last: a resumed run repeats some steps."""
    found = [event for event in events if event["step"] == step]
    last = max(found, key=lambda event: event["end"], default=None)
    return nest(event for event in found if last is not None and event.get("process") == last.get("process"))


class StepSpans:
    """The phases, rollouts and rows of a training step.

    Args:
        step: the step.
        events: the events of this step and of the steps around it.
        rows: the rows of the samples of these steps.
    """

    def __init__(self, step: int, events: Iterable[Row], rows: Sequence[Row]) -> None:
        by_kind: dict[str, list[Row]] = defaultdict(list)
        for event in events:
            by_kind[event["kind"]].append(event)
        self.phases = step_phases(by_kind[PHASE], step)
        whole = [phase for phase in self.phases if phase.name == STEP]
        self.training: Sequence[Phase] = whole or self.phases
        """The phases of the step itself, without validation."""
        times = [(phase.start, phase.end) for phase in self.phases]
        if not times:
            times = [(event["start"], _end(event)) for event in by_kind[ROLLOUT] if event["step"] == step]
            times += [(scoring_start(row), row["time"]) for row in rows if row.get("step") == step]
        self.start, self.end = min((t for t, _ in times), default=0.0), max((t for _, t in times), default=0.0)
        self.rollouts = [event for event in by_kind[ROLLOUT] if self._overlaps(event["start"], _end(event))]
        self.rows = [row for row in rows if self._overlaps(scoring_start(row), row["time"])]
        self.is_known = bool(times)
        """Whether anything is recorded for this step."""

    def _overlaps(self, start: float, end: float) -> bool:
        return end >= self.start and start <= self.end

    def spans(self) -> list[Span]:
        """Return all spans of the step, those of the trainer first."""
        ids = {row["uid"]: row["id"] for row in self.rows if row.get("uid") and row.get("id")}
        trainer = [phase for outer in self.phases for phase in outer.all() if phase.name != STEP]
        return [
            *(Span("trainer", TRAINER, phase.name, phase.start, phase.end) for phase in trainer),
            *rollout_spans(self.rollouts, ids),
            *judge_spans(self.rows),
        ]


def near_steps(step: int) -> range:
    """Return the steps whose samples may be drawn in a step."""
    return range(step - OLDER, step + NEWER + 1)


def read_step(folder: Path, step: int) -> StepSpans:
    """Read the events and rows of a training step.

    Args:
        folder: a records folder.
        step: the step.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: nothing is recorded for this step.
    """
    near = near_steps(step)
    found = StepSpans(step, read_events(folder, near), list(RecordsReader(folder).rows_of(near)))
    if not found.is_known:
        raise ConfigError(f"{folder} has no records of step {step}")
    return found


def timeline(folder: Path, step: int) -> dict[str, Any]:
    """Return the timeline of a training step: lanes of spans, the critical path, and its largest part.

    Times are in seconds since 1970. Spans of a lane are in the order of their starts, and may overlap.

    Args:
        folder: a records folder.
        step: the step.

    Raises:
        NoRecordsError: there is no such folder, or it contains no records.
        ConfigError: nothing is recorded for this step.
    """
    found = read_step(folder, step)
    spans = found.spans()
    kept = _largest(spans)
    lanes: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sorted(kept, key=lambda span: (span.start, -span.end)):
        lanes[span.kind, span.lane].append(span)
    path = critical_path(found.training, works(found.rollouts, found.rows)) if found.phases else []
    return {
        "step": step,
        "start": found.start,
        "end": found.end,
        "lanes": [
            {"name": lanes[key][0].lane, "kind": key[0], "spans": list(map(_to_dict, lanes[key]))}
            for key in order(lanes)
        ],
        "critical": [segment.to_dict() for segment in path],
        "bound": bound(path),
        "truncated": len(spans) - len(kept),
    }


def _largest(spans: Sequence[Span]) -> Sequence[Span]:
    if len(spans) <= MAX_SPANS:
        return spans
    longest = sorted(spans, key=lambda span: (span.kind != "trainer", -span.seconds))
    return longest[: max(MAX_SPANS, sum(span.kind == "trainer" for span in spans))]


def order(lanes: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
    """Return the lanes from top to bottom: rollouts, functions, judges, the trainer."""
    kinds = ("rollout", "judge", "trainer")
    return sorted(lanes, key=lambda key: (kinds.index(key[0]), key[1].startswith("judge "), key[1]))


def _to_dict(span: Span) -> dict[str, Any]:
    return {"name": span.name, "start": span.start, "end": span.end, "id": span.id, "detail": dict(span.detail)}


def _end(rollout: Row) -> float:
    """Return when the reward of a rollout arrived, or the end of generation."""
    return rollout.get("scored") or rollout["end"]
