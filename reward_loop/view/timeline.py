"""The timeline of a training step: lanes of spans, and what the trainer waited for."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from reward_loop._util.text import cut
from reward_loop.errors import ConfigError
from reward_loop.index.filters import SampleFilter
from reward_loop.index.index import Index
from reward_loop.index.phases import Phase, Row, nest
from reward_loop.records import PHASE, ROLLOUT, STEP, read_events

Kind = Literal["rollout", "judge", "trainer"]

TRAINER = "trainer"
"""The lane of the trainer's phases."""

MAX_SPANS = 5000
"""The largest number of spans of a timeline. The shortest ones are left out; those of the trainer stay."""

OLDER, NEWER = 3, 1
"""The largest difference between a step and the step of a sample that is drawn in it: a step may train on rollouts of
earlier steps, and rollouts of the next step are generated at the same time."""

_MAX_ERROR = 200
"""The largest number of characters of an error."""


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of time in one lane. Spans of a lane may overlap."""

    kind: Kind
    lane: str
    name: str
    start: float
    """In seconds since 1970, like `end`."""
    end: float
    id: str | None = None
    """The ID of the sample's record."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        return self.end - self.start


def rollout_spans(rollouts: Iterable[Row], ids: Mapping[str, str]) -> Iterator[Span]:
    """Yield the generation of each rollout, if its duration is known.

    Args:
        rollouts: events of rollouts.
        ids: the ID of the record of each uid, as far as it is known.
    """
    for event in rollouts:
        if event["end"] == event["start"]:  # scored in an own trainer, which has not recorded when it generated
            continue
        detail = {"group": event.get("group"), "step": event.get("step"), "error": _short(event.get("error"))}
        lane = "validation rollouts" if event.get("validate") else "rollouts"
        uid = str(event.get("uid"))
        yield Span("rollout", lane, uid, event["start"], event["end"], ids.get(uid), _known(detail))


def judge_spans(rows: Iterable[Row]) -> Iterator[Span]:
    """Yield the calls of reward functions, and the requests to judges.

    Args:
        rows: the rows of samples. The lane of a call is its function, that of a request its model and server.
    """
    for row in rows:
        name, began = str(row.get("uid")), scoring_start(row)
        common = {"group": row.get("group"), "step": row.get("step"), "outcome": row.get("outcome")}
        calls = row.get("calls") or [{**row, "start_s": 0.0, "error": None}]
        for call in calls:
            start = began + (call.get("start_s") or 0.0)
            end = (
                start + sum(call.get(part) or 0.0 for part in ("wait_s", "work_s")) if row.get("calls") else row["time"]
            )
            parts = {part: call.get(part) for part in ("batch_s", "queue_s", "wait_s", "work_s")}
            detail = common | parts | {"error": _short(call.get("error") or row.get("error"))}
            lane = str(call.get("function") or row.get("function"))
            yield Span("judge", lane, name, start, min(end, row["time"]), row.get("id"), _known(detail))
        for judge in row.get("judges") or ():
            start = judge.get("time")
            if start is None:
                continue
            fields = ("status", "attempt", "verdict", "score", "unscored", "prompt_tokens", "completion_tokens")
            detail = common | {part: judge.get(part) for part in fields} | {"error": _short(judge.get("error"))}
            end = start + (judge.get("seconds") or 0.0)
            yield Span("judge", f"judge {server_of(judge)}", name, start, end, row.get("id"), _known(detail))


def _short(error: Any) -> str | None:
    return None if error is None else cut(str(error), _MAX_ERROR)


def _known(detail: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in detail.items() if value is not None}


def step_phases(events: Iterable[Row], step: int) -> list[Phase]:
    """Return the outermost phases of a step, of the trainer that ran it last: a resumed run repeats some steps."""
    found = [event for event in events if event["step"] == step]
    last = max(found, key=lambda event: event["end"], default=None)
    return nest(event for event in found if last is not None and event.get("process") == last.get("process"))


_SCORED = "SELECT min(time - coalesce(total_s, 0)) AS since, max(time) AS until FROM samples WHERE step = ?"


def near_steps(step: int) -> range:
    """Return the steps whose samples may be drawn in a step."""
    return range(step - OLDER, step + NEWER + 1)


def timeline(index: Index, step: int) -> dict[str, Any]:
    """Return the timeline of a training step: lanes of spans, and a sentence about its longest phase.

    Times are in seconds since 1970. Spans of a lane are in the order of their starts, and may overlap.

    Args:
        index: the index of the records.
        step: the step.

    Raises:
        ConfigError: nothing is recorded for this step.
    """
    near = near_steps(step)
    bounds = (near[0], near[-1])
    chosen = SampleFilter().also("step BETWEEN ? AND ? OR generated_step BETWEEN ? AND ?", *bounds, *bounds)
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for event in read_events(index.folder, near):
        by_kind[event["kind"]].append(event)
    phases = step_phases(by_kind[PHASE], step)
    times = [(phase.start, phase.end) for phase in phases]
    if not times:
        times = [(event["start"], _end(event)) for event in by_kind[ROLLOUT] if event["step"] == step]
        (scored,) = index.rows(_SCORED, [step])
        times += [tuple(scored.values())] if scored["since"] is not None else []
    if not times:
        raise ConfigError(f"{index.folder} has no records of step {step}")
    start, end = min(begun for begun, _ in times), max(ended for _, ended in times)
    rollouts = [event for event in by_kind[ROLLOUT] if _end(event) >= start and event["start"] <= end]
    uids = {str(event.get("uid")) for event in rollouts}
    ids: dict[str, str] = {}
    seen = 0

    # One by one: a step may have a million samples, and few of their spans are drawn.
    def others() -> Iterator[Span]:
        nonlocal seen
        for span in chain(of_samples(), rollout_spans(rollouts, ids)):  # in this order: samples have the IDs
            seen += 1
            yield span

    def of_samples() -> Iterator[Span]:
        # The index selects by the same times, or by slightly more.
        for row in index.records(chosen.also("time >= ? AND time - coalesce(total_s, 0) <= ?", start, end)):
            if row["time"] >= start and scoring_start(row) <= end:
                if row.get("id") and (uid := row.get("uid")) in uids:
                    ids[uid] = row["id"]
                yield from judge_spans([row])

    trainer = [
        Span("trainer", TRAINER, phase.name, phase.start, phase.end)
        for outer in phases
        for phase in outer.all()
        if phase.name != STEP
    ]
    longest = heapq.nlargest(max(0, MAX_SPANS - len(trainer)), others(), key=lambda span: span.seconds)
    lanes = lanes_of([*trainer, *longest])
    return {
        "step": step,
        "start": start,
        "end": end,
        "lanes": [{"name": name, "kind": kind, "spans": list(map(_to_dict, spans))} for kind, name, spans in lanes],
        "longest": longest_phase([phase for phase in phases if phase.name == STEP] or phases),  # without validation
        "truncated": seen - len(longest),
    }


def longest_phase(step: Sequence[Phase]) -> str | None:
    """Return a sentence about the longest phase, and what the trainer waited for in it; ``None`` without phases."""
    phases = [phase for outer in step for phase in outer.all() if phase.name != STEP]
    if not phases:
        return None
    longest = max(phases, key=lambda phase: phase.seconds)
    waited = "" if longest.waits_for is None else f", in which the trainer waited for {longest.waits_for}"
    share = f"{longest.seconds:.1f} s of {step[-1].end - step[0].start:.1f} s"
    return f"The longest phase was {longest.name}{waited}: {share}."


def lanes_of(spans: Iterable[Span]) -> list[tuple[Kind, str, list[Span]]]:
    """Return the lanes from top to bottom: rollouts, functions, judges, the trainer.

    Each has its kind, its name, and its spans in the order of their starts.
    """
    lanes: dict[tuple[Kind, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lanes[span.kind, span.lane].append(span)
    kinds = ("rollout", "judge", "trainer")
    ordered = sorted(lanes, key=lambda lane: (kinds.index(lane[0]), lane[1].startswith("judge "), lane[1]))
    return [(kind, name, lanes[kind, name]) for kind, name in ordered]


def _to_dict(span: Span) -> dict[str, Any]:
    return {"name": span.name, "start": span.start, "end": span.end, "id": span.id, "detail": dict(span.detail)}


def _end(rollout: Row) -> float:
    """Return when the reward of a rollout arrived, or the end of generation."""
    return rollout.get("scored") or rollout["end"]


def scoring_start(row: Row) -> float:
    """Return when the scoring of a sample began, in seconds since 1970."""
    return row["time"] - (row.get("total_s") or 0.0)


def server_of(judge: Row) -> str:
    """Return the model and the server of an exchange."""
    return " at ".join(str(part) for part in (judge.get("model"), judge.get("backend")) if part) or str(
        judge.get("url")
    )
